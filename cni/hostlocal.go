package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// host-local, the CNI project's plugin for addresses, keeps a file for each address in use, whose content names the
// container it is for. It syncs none of them. After a power cut the newest are there and empty: no DEL
// ever finds them again, and there is no GC in host-local, so that each would be lost for good. An empty
// file is nobody's, for host-local writes the name before it gives its lock up.

// hostLocalDir is host-local's default "dataDir".
const hostLocalDir = "/var/lib/cni/networks"

// releaseTorn gives back the addresses of a network whose reservations name nobody.
func (n *Network) releaseTorn(ctx context.Context, list *libcni.NetworkConfigList) error {
	var errs []error
	for _, dir := range hostLocalDirs(list) {
		if err := n.releaseTornIn(ctx, dir); err != nil {
			errs = append(errs, fmt.Errorf("addresses of network %q in %s: %w", list.Name, dir, err))
		}
	}
	return errors.Join(errs...)
}

// hostLocalDirs returns where a network may have its addresses: where its configuration says, or in the default
// place, which plugins use that call host-local by themselves.
func hostLocalDirs(list *libcni.NetworkConfigList) []string {
	dirs := []string{filepath.Join(hostLocalDir, list.Name)}
	for _, p := range list.Plugins {
		if dataDir, ok := asksHostLocal(p); ok && dataDir != "" {
			dirs = append(dirs, filepath.Join(dataDir, list.Name))
		}
	}
	return dirs
}

// asksHostLocal tells whether a plugin is told to get addresses from host-local, and where those are kept; "": in
// the default place.
func asksHostLocal(p *libcni.PluginConfig) (dataDir string, ok bool) {
	var conf struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	err := json.Unmarshal(p.Bytes, &conf)
	return conf.IPAM.DataDir, err == nil && conf.IPAM.Type == "host-local"
}

func (n *Network) releaseTornIn(ctx context.Context, dir string) error {
	torn, err := tornReservations(dir)
	if len(torn) == 0 || err != nil {
		return err
	}
	unlock, err := lockHostLocal(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()
	if torn, err = tornReservations(dir); err != nil { // some may have been about to be written
		return err
	}
	for _, path := range torn {
		failpoint.Reach("cni.release-torn")
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		failpoint.Reach("cni.torn-released")
		n.log.Warn("an address was reserved for nobody: its file is empty, as after a power cut", "file", path)
	}
	return nil
}

// tornReservations returns the files of addresses that name nobody.
func tornReservations(dir string) (torn []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err != nil || !e.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.Trim(content, "\x00")) == 0 { // some filesystems fill up with zeros
			torn = append(torn, path)
		}
	}
	return torn, nil
}

// lockHostLocal takes the lock that host-local has while it works.
func lockHostLocal(ctx context.Context, dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil // the lock goes with the descriptor
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(&os.PathError{Op: "flock", Path: f.Name(), Err: err}, f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for host-local's lock: %w", ctx.Err()), f.Close())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

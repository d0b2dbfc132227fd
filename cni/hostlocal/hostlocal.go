// Package hostlocal knows the files of host-local, the CNI project's plugin for addresses: which a network uses, whom addresses are
// kept for, and which are kept for nobody.
//
// # Contract
//
// host-local keeps a file for each address in use, whose content names the container it is for. It syncs none of them. After a power cut
// the newest are there and empty: no DEL ever finds them again, and there is no GC in host-local, so that each would be lost for good.
// An empty file is nobody's, for host-local writes the name before it gives its lock up; ReleaseTorn has the
// lock. Nothing else is ever changed: what is kept for a container is given back by a DEL.
package hostlocal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// DefaultDir is host-local's default "dataDir".
const DefaultDir = "/var/lib/cni/networks"

// Dirs returns where a network may have its addresses: where its configuration says, or in the default
// place, which plugins use that call host-local by themselves.
func Dirs(list *libcni.NetworkConfigList) []string {
	dirs := []string{filepath.Join(DefaultDir, list.Name)}
	for _, p := range list.Plugins {
		if dataDir, ok := asks(p); ok && dataDir != "" {
			dirs = append(dirs, filepath.Join(dataDir, list.Name))
		}
	}
	return dirs
}

// asks tells whether a plugin is told to get addresses from host-local, and where those are kept; "": in
// the default place.
func asks(p *libcni.PluginConfig) (dataDir string, ok bool) {
	var conf struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	err := json.Unmarshal(p.Bytes, &conf)
	return conf.IPAM.DataDir, err == nil && conf.IPAM.Type == "host-local"
}

// ReleaseTorn gives back the addresses in a directory whose files name nobody. While another has the lock it waits, until ctx ends.
func ReleaseTorn(ctx context.Context, dir string, log *slog.Logger) error {
	torn, err := tornReservations(dir)
	if len(torn) == 0 || err != nil {
		return err
	}
	unlock, err := lock(ctx, dir)
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
		log.Warn("an address was reserved for nobody: its file is empty, as after a power cut", "file", path)
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

// lock takes the lock that host-local has while it works.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
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

// Uses tells whether a network has its addresses from host-local, as far as its configuration tells.
func Uses(list *libcni.NetworkConfigList) bool {
	return slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { _, ok := asks(p); return ok })
}

// Reservation is an address that host-local keeps for a pod, in a file.
type Reservation struct {
	File  string
	IP    string
	PodID string
}

// maxSize is the largest file of an address that is read.
const maxSize = 1 << 20

// Reservations reads the addresses in a directory. One that does not exist has none.
func Reservations(dir string) ([]Reservation, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses of host-local: %w", err)
	}
	var all []Reservation
	for _, e := range entries {
		ip, err := netip.ParseAddr(e.Name())
		if err != nil {
			continue // its lock and the last address it gave
		}
		data, err := safefs.ReadHostFile(filepath.Join(dir, e.Name()), maxSize)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read address of host-local: %w", err)
		}
		id, _, _ := strings.Cut(string(data), "\n") // the interface is in the second line
		all = append(all, Reservation{File: filepath.Join(dir, e.Name()), IP: ip.String(), PodID: strings.TrimSpace(id)})
	}
	return all, nil
}

// Holds tells whether an address is kept for a pod, in any network below dataDir.
func Holds(dataDir, podID string) (bool, error) {
	networks, err := os.ReadDir(dataDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return true, fmt.Errorf("read addresses of host-local: %w", err)
	}
	for _, network := range networks {
		if !network.IsDir() {
			continue
		}
		reserved, err := Reservations(filepath.Join(dataDir, network.Name()))
		if err != nil || slices.ContainsFunc(reserved, func(r Reservation) bool { return r.PodID == podID }) {
			return true, err
		}
	}
	return false, nil
}

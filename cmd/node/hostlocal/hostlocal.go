// Package hostlocal reads the files of host-local, the CNI project's IPAM plugin.
//
// # Contract
//
// host-local keeps one file per address in use. The file's content is the container ID and the
// interface. The plugin syncs no file and has no GC. After a power failure the newest files are
// empty, so no DEL finds them and their addresses would be lost. ReleaseOrphans removes such files.
// This is safe, because ReleaseOrphans holds host-local's lock, and host-local writes the container
// ID before it releases the lock. ReleaseOrphans never changes files with a container ID.
package hostlocal

import (
	"bytes"
	"cmp"
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

	"berth/cni"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// defaultDir is host-local's default "dataDir".
const defaultDir = "/var/lib/cni/networks"

// maxSize is the largest file of an address that is read.
const maxSize = 1 << 20

// Reader reads host-local's files. It implements cni.IPAMReader.
type Reader struct {
	DefaultDir string // host-local's default "dataDir"; "": /var/lib/cni/networks
}

var _ cni.IPAMReader = Reader{}

func (r Reader) defaultDir() string { return cmp.Or(r.DefaultDir, defaultDir) }

// dirs returns the directories that may hold a network's addresses. The directories include the
// default, because some plugins execute host-local with a configuration that the list does not
// show.
func (r Reader) dirs(list *libcni.NetworkConfigList) []string {
	dirs := []string{filepath.Join(r.defaultDir(), list.Name)}
	for _, p := range list.Plugins {
		if dataDir, ok := ipamOf(p); ok && dataDir != "" {
			dirs = append(dirs, filepath.Join(dataDir, list.Name))
		}
	}
	return dirs
}

// ipamOf reports whether a plugin uses host-local, and returns its "dataDir", or "" for the
// default.
func ipamOf(p *libcni.PluginConfig) (dataDir string, ok bool) {
	var conf struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	err := json.Unmarshal(p.Bytes, &conf)
	return conf.IPAM.DataDir, err == nil && conf.IPAM.Type == "host-local"
}

// Uses reports whether a plugin of the list names host-local as its IPAM plugin.
func (r Reader) Uses(list *libcni.NetworkConfigList) bool {
	return slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { _, ok := ipamOf(p); return ok })
}

// Reservations returns the addresses of a network in all directories that may hold them.
func (r Reader) Reservations(list *libcni.NetworkConfigList) (all []cni.Reservation, err error) {
	for _, dir := range r.dirs(list) {
		found, err := reservations(dir)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// reservations reads the addresses in a directory, which need not exist.
func reservations(dir string) ([]cni.Reservation, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses of host-local: %w", err)
	}
	var all []cni.Reservation
	for _, e := range entries {
		ip, err := netip.ParseAddr(e.Name())
		if err != nil {
			continue // the lock file and the last reserved address
		}
		data, err := safefs.ReadHostFile(filepath.Join(dir, e.Name()), maxSize)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read address of host-local: %w", err)
		}
		id, _, _ := strings.Cut(string(data), "\n") // the second line is the interface
		all = append(all, cni.Reservation{File: filepath.Join(dir, e.Name()), IP: ip.String(), PodID: strings.TrimSpace(id)})
	}
	return all, nil
}

// Holds reports whether a network in the default directory has an address of the pod.
func (r Reader) Holds(podID string) (bool, error) {
	networks, err := os.ReadDir(r.defaultDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return true, fmt.Errorf("read addresses of host-local: %w", err)
	}
	for _, network := range networks {
		if !network.IsDir() {
			continue
		}
		reserved, err := reservations(filepath.Join(r.defaultDir(), network.Name()))
		if err != nil || slices.ContainsFunc(reserved, func(r cni.Reservation) bool { return r.PodID == podID }) {
			return true, err
		}
	}
	return false, nil
}

// ReleaseOrphans removes a network's address files without a container ID. It waits for
// host-local's lock until ctx ends. A failure does not stop the remaining steps.
func (r Reader) ReleaseOrphans(ctx context.Context, list *libcni.NetworkConfigList, log *slog.Logger) error {
	var errs []error
	for _, dir := range r.dirs(list) {
		if err := releaseOrphans(ctx, dir, log); err != nil {
			errs = append(errs, fmt.Errorf("host-local directory %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

func releaseOrphans(ctx context.Context, dir string, log *slog.Logger) error {
	orphans, err := findOrphans(dir)
	if len(orphans) == 0 || err != nil {
		return err
	}
	unlock, err := lock(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()
	if orphans, err = findOrphans(dir); err != nil { // before the lock was held, host-local may have been writing some of the files
		return err
	}
	for _, path := range orphans {
		failpoint.Reach("cni.release-torn")
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		failpoint.Reach("cni.torn-released")
		log.Warn("released an address whose reservation was empty, as after a power cut", "file", path)
	}
	return nil
}

// findOrphans returns the address files without a container ID.
func findOrphans(dir string) (orphans []string, err error) {
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
		if len(bytes.Trim(content, "\x00")) == 0 { // some filesystems fill lost data with zeros
			orphans = append(orphans, path)
		}
	}
	return orphans, nil
}

// lock takes host-local's lock.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil // closing the descriptor releases the lock
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

// Package addresses stores the addresses of attachments in a directory that several processes
// share.
//
// # Contract
//
// Each attachment, identified by container ID and interface, has one file. The file's name contains
// its addresses, container ID and interface. So one filesystem operation reserves or releases all
// addresses of an attachment, and a crash cannot split it. A file that a power failure empties is
// still valid. The package does not sync files, because no pod survives a power failure. If the
// creation was lost, so was the pod. If a power failure has undone the removal, the next DEL or GC
// repeats it.
//
// The file's content is a note of the owner. After a power failure it may be damaged.
//
// Writers hold the lock, flock on the file "lock". Readers need no lock. A released address is
// reused as late as possible. The search starts after the last assigned address, which is in the
// file "last". If this file is invalid, the search starts at the beginning of the range.
package addresses

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/internal/failpoint"
	"berth/internal/lockfile"
	"berth/internal/safefs"
)

const (
	lockName = "lock"
	lastName = "last"

	// MaxID is the length of the longest container ID. A file name has at most 255 bytes. Two
	// addresses, the longest interface name and the separators take 73.
	MaxID = 182

	maxNote = 1 << 20
	maxLast = 256
)

// LockTimeout bounds Lock. It is three times the timeout of the node's bridge lock (links.Lock),
// because a holder of this lock may wait for the bridge lock.
const LockTimeout = 30 * time.Second

// Store is a directory of addresses. Its methods may be called concurrently.
type Store struct {
	LockTimeout time.Duration // of Lock; 0: LockTimeout

	dir string
}

// Reservation is the addresses of an attachment.
type Reservation struct {
	ContainerID string
	IfName      string
	IPs         []netip.Addr // one or two
}

// Errors of Reserve.
var (
	ErrExists = errors.New("the attachment already has addresses")
	ErrFull   = errors.New("no address is free")
)

// Open returns the store in a directory and creates the directory.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create address directory: %w", err)
	}
	return &Store{dir: dir}, nil
}

// Check returns why no address can be reserved in a directory, or nil. It creates nothing. It fails
// if the path is not a directory, or if the directory or its closest existing parent is not
// writable.
func Check(dir string) error {
	for {
		err := unix.Access(dir, unix.W_OK|unix.X_OK)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.ENOENT) || dir == filepath.Dir(dir) {
			return fmt.Errorf("address directory is not writable: %w", &os.PathError{Op: "access", Path: dir, Err: err})
		}
		dir = filepath.Dir(dir)
	}
}

// Inspect returns the store in a directory for reading. The directory may not exist.
func Inspect(dir string) *Store { return &Store{dir: dir} }

// Lock takes the store's lock. After the timeout, or when ctx ends, it returns
// context.DeadlineExceeded with the lock's path. The kernel releases the lock when the process
// exits.
func (s *Store) Lock(ctx context.Context) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.LockTimeout, LockTimeout))
	defer cancel()
	unlock, err = lockfile.Wait(ctx, filepath.Join(s.dir, lockName), lockfile.Exclusive)
	if err != nil {
		return nil, fmt.Errorf("lock addresses: %w", err)
	}
	return unlock, nil
}

// CheckLock returns the error that Lock would return, without waiting. It returns nil if the
// directory does not exist yet.
func (s *Store) CheckLock() error {
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := lockfile.Check(filepath.Join(s.dir, lockName)); err != nil {
		return fmt.Errorf("lock addresses: %w", err)
	}
	return nil
}

// Reserve assigns one address of each range to an attachment: a preferred address if it is in the
// range and free. Errors: ErrExists, ErrFull, and errors of the filesystem.
func (s *Store) Reserve(ctx context.Context, id, ifName string, ranges []conf.Range,
	preferred []netip.Addr) (Reservation, error) {
	r := Reservation{ContainerID: id, IfName: ifName}
	if len(id) > MaxID {
		return r, fmt.Errorf("the container ID has %d bytes, more than %d", len(id), MaxID)
	}
	unlock, err := s.Lock(ctx)
	if err != nil {
		return r, err
	}
	defer unlock()
	all, err := s.All()
	if err != nil {
		return r, err
	}
	used := make(map[netip.Addr]bool, 2*len(all)+len(ranges))
	for _, other := range all {
		if other.ContainerID == id && other.IfName == ifName {
			return r, ErrExists
		}
		for _, ip := range other.IPs {
			used[ip] = true
		}
	}
	last := s.last()
	for _, from := range ranges {
		used[from.Gateway] = true
		ip, ok := freeOf(preferred, from, used)
		if !ok {
			ip, ok = free(from, used, last)
		}
		if !ok {
			return r, fmt.Errorf("%w in %s (%s to %s)", ErrFull, from.Subnet, from.First, from.Last)
		}
		r.IPs = append(r.IPs, ip)
	}
	return r, s.keep(r)
}

func (s *Store) keep(r Reservation) error {
	failpoint.Reach("net.reserve")
	f, err := os.OpenFile(s.path(r), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("reserve addresses: %w", err)
	}
	failpoint.Reach("net.reserved")
	if err := f.Close(); err != nil {
		return fmt.Errorf("reserve addresses: %w", err)
	}
	if err := s.remember(r.IPs); err != nil {
		return errors.Join(err, s.Release(r))
	}
	return nil
}

// freeOf returns the first of some addresses that is in a range and unused.
func freeOf(some []netip.Addr, r conf.Range, used map[netip.Addr]bool) (netip.Addr, bool) {
	for _, ip := range some {
		if ip.BitLen() == r.First.BitLen() && ip.Zone() == "" && !ip.Less(r.First) && !r.Last.Less(ip) && !used[ip] {
			return ip, true
		}
	}
	return netip.Addr{}, false
}

// free finds the first unused address after the last assigned one of its family.
func free(r conf.Range, used map[netip.Addr]bool, last []netip.Addr) (netip.Addr, bool) {
	start := r.First
	for _, ip := range last {
		if ip.BitLen() == start.BitLen() && !ip.Less(r.First) && ip.Less(r.Last) {
			start = ip.Next()
		}
	}
	ip := start
	for range len(used) + 1 { // if there are more steps than used addresses, one of them finds a free address
		if !used[ip] {
			return ip, true
		}
		if ip = ip.Next(); !ip.IsValid() || r.Last.Less(ip) {
			ip = r.First
		}
		if ip == start {
			break
		}
	}
	return netip.Addr{}, false
}

// last returns the addresses that were assigned last. It returns nil if the file is missing or
// damaged.
func (s *Store) last() (ips []netip.Addr) {
	data, err := safefs.ReadHostFile(filepath.Join(s.dir, lastName), maxLast)
	if err != nil {
		return nil
	}
	for text := range strings.SplitSeq(strings.TrimSpace(string(data)), ",") {
		if ip, err := netip.ParseAddr(text); err == nil && ip.Zone() == "" && !ip.Is4In6() {
			ips = append(ips, ip)
		}
	}
	return ips
}

// remember writes the addresses that were assigned last. It does not need an atomic rename, because
// last ignores a damaged file.
func (s *Store) remember(ips []netip.Addr) error {
	failpoint.Reach("net.remember")
	err := os.WriteFile(filepath.Join(s.dir, lastName), []byte(join(ips)+"\n"), 0o600)
	failpoint.Reach("net.remembered")
	if err != nil {
		return fmt.Errorf("write last assigned addresses: %w", err)
	}
	return nil
}

// All returns all reservations. It ignores files with other names.
func (s *Store) All() ([]Reservation, error) {
	dir, err := os.Open(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read addresses: %w", err)
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Close()); err != nil {
		return nil, fmt.Errorf("read addresses: %w", err)
	}
	all := make([]Reservation, 0, len(names))
	for _, name := range names {
		if r, ok := parse(name); ok {
			all = append(all, r)
		}
	}
	return all, nil
}

// Of returns the reservation of an attachment. ok is false if the attachment has none.
func (s *Store) Of(id, ifName string) (r Reservation, ok bool, err error) {
	all, err := s.All()
	for _, r := range all {
		if r.ContainerID == id && r.IfName == ifName {
			return r, true, nil
		}
	}
	return Reservation{}, false, err
}

// SetNote writes the owner's note into the reservation's file.
func (s *Store) SetNote(r Reservation, note []byte) error {
	failpoint.Reach("net.note")
	f, err := os.OpenFile(s.path(r), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("write note of addresses: %w", err)
	}
	_, err = f.Write(note)
	err = errors.Join(err, f.Close())
	failpoint.Reach("net.noted")
	if err != nil {
		return fmt.Errorf("write note of addresses: %w", err)
	}
	return nil
}

// Noted returns the note of a reservation, or nil.
func (s *Store) Noted(r Reservation) ([]byte, error) {
	note, err := safefs.ReadHostFile(s.path(r), maxNote)
	if err != nil {
		return nil, fmt.Errorf("read note of addresses: %w", err)
	}
	return note, nil
}

// Note has a reservation and its note.
type Note struct {
	Reservation
	Note []byte
}

// Notes returns the reservations that have a note, newest first.
func (s *Store) Notes() ([]Note, error) {
	all, err := s.All()
	if err != nil {
		return nil, err
	}
	type dated struct {
		Note
		at time.Time
	}
	var notes []dated
	for _, r := range all {
		info, err := os.Lstat(s.path(r))
		if errors.Is(err, fs.ErrNotExist) {
			continue // released meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read note of addresses: %w", err)
		}
		if info.Size() == 0 {
			continue
		}
		text, err := s.Noted(r)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		notes = append(notes, dated{Note{r, text}, info.ModTime()})
	}
	slices.SortStableFunc(notes, func(a, b dated) int { return b.at.Compare(a.at) })
	found := make([]Note, len(notes))
	for i, n := range notes {
		found[i] = n.Note
	}
	return found, nil
}

// Release releases the addresses of a reservation. It may be repeated. It needs no lock, because
// Reserve never assigns an address that has a file.
func (s *Store) Release(r Reservation) error {
	failpoint.Reach("net.release")
	err := os.Remove(s.path(r))
	failpoint.Reach("net.released")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release addresses: %w", err)
	}
	return nil
}

func (s *Store) path(r Reservation) string { return filepath.Join(s.dir, r.name()) }

// Path returns the file of a reservation.
func (s *Store) Path(r Reservation) string { return s.path(r) }

// name returns the file name: addresses@container@interface.
func (r Reservation) name() string { return join(r.IPs) + "@" + r.ContainerID + "@" + r.IfName }

func join(ips []netip.Addr) string {
	texts := make([]string, len(ips))
	for i, ip := range ips {
		texts[i] = ip.String()
	}
	return strings.Join(texts, ",")
}

// parse decodes a file name. It accepts only names that the method name returns.
func parse(name string) (r Reservation, ok bool) {
	parts := strings.SplitN(name, "@", 3) // an interface name may contain an @
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return r, false
	}
	r.ContainerID, r.IfName = parts[1], parts[2]
	for text := range strings.SplitSeq(parts[0], ",") {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Zone() != "" {
			return r, false
		}
		r.IPs = append(r.IPs, ip)
	}
	return r, len(r.IPs) <= 2 && r.name() == name
}

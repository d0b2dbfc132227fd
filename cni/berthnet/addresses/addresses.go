// Package addresses keeps which address is whose, in a directory that several processes share.
//
// # Contract
//
// An attachment, a container's ID and an interface, has one file, and all that must not be lost is in the file's name: the
// addresses and whose they are. So they are reserved and given back together by one step of the filesystem, which a crash does not
// cut in two, and a file that a power cut leaves empty or torn tells as much as before. Nothing is synced: pods
// end with the power. If the file's creation was lost, so was the pod; if its removal was, the next DEL or GC removes it again.
//
// A file's content is a note of its owner's, about what ends with the power, too. After a power cut it may be anything.
//
// Who changes something holds the lock, flock on the file "lock", and so waits for other processes; readers don't. An address
// that was given back is given again as late as possible: the search goes on from the last one given, which "last" tells; where that
// file can't be understood the search begins anew.
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

	// MaxID is the longest ID of a container that can be kept: names of files have 255 bytes, of which two addresses, the longest
	// interface and what is between them take 73.
	MaxID = 182

	maxNote = 1 << 20
	maxLast = 256
)

// LockPatience is how long Lock waits. Who has the lock may be waiting for that of the node's bridges, for a third of it (links.Lock), and calls the kernel
// a few times.
const LockPatience = 30 * time.Second

// Store is a directory of addresses. Its methods may be called concurrently.
type Store struct {
	Patience time.Duration // of Lock; 0: LockPatience

	dir string
}

// Reservation is what is kept for an attachment.
type Reservation struct {
	ContainerID string
	IfName      string
	IPs         []netip.Addr // one or two
}

// Errors of Reserve.
var (
	ErrExists = errors.New("the attachment has addresses already")
	ErrFull   = errors.New("no address is free")
)

// Open returns the store in a directory, and makes that.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of addresses: %w", err)
	}
	return &Store{dir: dir}, nil
}

// Check tells why nothing can be reserved in a directory, as far as that can be told without making anything: there is something else, or
// it, or the one that it would be made in, can't be written to.
func Check(dir string) error {
	for {
		err := unix.Access(dir, unix.W_OK|unix.X_OK)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.ENOENT) || dir == filepath.Dir(dir) {
			return fmt.Errorf("addresses can't be kept: %w", &os.PathError{Op: "access", Path: dir, Err: err})
		}
		dir = filepath.Dir(dir)
	}
}

// Inspect returns the store in a directory for reading, whether it exists or not.
func Inspect(dir string) *Store { return &Store{dir: dir} }

// Lock waits until no other has the store, or ctx ends, or its patience, with context.DeadlineExceeded and the lock's name: who is stuck with it shall not
// have others wait for ever. The lock is free when its owner has died, too.
func (s *Store) Lock(ctx context.Context) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.Patience, LockPatience))
	defer cancel()
	unlock, err = lockfile.Wait(ctx, filepath.Join(s.dir, lockName), lockfile.Exclusive)
	if err != nil {
		return nil, fmt.Errorf("lock addresses: %w", err)
	}
	return unlock, nil
}

// CheckLock tells why Lock would fail, however long it waits, or nil; also where there is no directory yet (Check).
func (s *Store) CheckLock() error {
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := lockfile.Check(filepath.Join(s.dir, lockName)); err != nil {
		return fmt.Errorf("lock addresses: %w", err)
	}
	return nil
}

// Reserve gives an attachment an address of each range. Errors: ErrExists, ErrFull, and the filesystem's.
func (s *Store) Reserve(ctx context.Context, id, ifName string, ranges []conf.Range) (Reservation, error) {
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
		ip, ok := free(from, used, last)
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

// free finds the first address that nobody has after the last one that was given; there is one of each family.
func free(r conf.Range, used map[netip.Addr]bool, last []netip.Addr) (netip.Addr, bool) {
	start := r.First
	for _, ip := range last {
		if ip.BitLen() == start.BitLen() && !ip.Less(r.First) && ip.Less(r.Last) {
			start = ip.Next()
		}
	}
	ip := start
	for range len(used) + 1 { // so many can't all be used
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

// last tells the addresses that were given last, as far as that is known.
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

// remember writes which addresses were given last. It is not replaced by rename: it may as well be torn.
func (s *Store) remember(ips []netip.Addr) error {
	failpoint.Reach("net.remember")
	err := os.WriteFile(filepath.Join(s.dir, lastName), []byte(join(ips)+"\n"), 0o600)
	failpoint.Reach("net.remembered")
	if err != nil {
		return fmt.Errorf("note the addresses given last: %w", err)
	}
	return nil
}

// All returns what is kept. Files that no Store has named are passed over.
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

// Of returns what is kept for an attachment; ok is false where that is nothing.
func (s *Store) Of(id, ifName string) (r Reservation, ok bool, err error) {
	all, err := s.All()
	for _, r := range all {
		if r.ContainerID == id && r.IfName == ifName {
			return r, true, nil
		}
	}
	return Reservation{}, false, err
}

// SetNote writes an owner's note into the file of its addresses.
func (s *Store) SetNote(r Reservation, note []byte) error {
	failpoint.Reach("net.note")
	f, err := os.OpenFile(s.path(r), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("note what addresses are used for: %w", err)
	}
	_, err = f.Write(note)
	err = errors.Join(err, f.Close())
	failpoint.Reach("net.noted")
	if err != nil {
		return fmt.Errorf("note what addresses are used for: %w", err)
	}
	return nil
}

// Noted returns the note, nil where there is none.
func (s *Store) Noted(r Reservation) ([]byte, error) {
	note, err := safefs.ReadHostFile(s.path(r), maxNote)
	if err != nil {
		return nil, fmt.Errorf("read what addresses are used for: %w", err)
	}
	return note, nil
}

// Note is what an owner has noted of its addresses.
type Note struct {
	Reservation
	Note []byte
}

// Notes returns what owners have noted, the newest first.
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
			continue // given back meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read what addresses are used for: %w", err)
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

// Release gives the addresses back. It may be repeated. It needs no lock: nobody gives what is in use, and what is
// not is given a little later.
func (s *Store) Release(r Reservation) error {
	failpoint.Reach("net.release")
	err := os.Remove(s.path(r))
	failpoint.Reach("net.released")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("give addresses back: %w", err)
	}
	return nil
}

func (s *Store) path(r Reservation) string { return filepath.Join(s.dir, r.name()) }

// Path is where a reservation is kept.
func (s *Store) Path(r Reservation) string { return s.path(r) }

// name is the file's: addresses@container@interface.
func (r Reservation) name() string { return join(r.IPs) + "@" + r.ContainerID + "@" + r.IfName }

func join(ips []netip.Addr) string {
	texts := make([]string, len(ips))
	for i, ip := range ips {
		texts[i] = ip.String()
	}
	return strings.Join(texts, ",")
}

// parse reads a file's name. Only what name has made is understood.
func parse(name string) (r Reservation, ok bool) {
	parts := strings.SplitN(name, "@", 3) // an interface may have an @ in its name
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

package addresses

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/cni/berthnet/conf"
	"berth/internal/testutil"
)

// small returns ranges with four addresses per family.
func small(t testing.TB) []conf.Range {
	n, err := conf.Parse([]byte(`{"cniVersion": "1.1.0", "name": "n", "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.10", "rangeEnd": "10.0.0.13"}], [{"subnet": "fd00::/126"}]]}}`))
	testutil.Must(t, err)
	return n.Ranges
}

func newStore(t testing.TB) *Store {
	s, err := Open(filepath.Join(t.TempDir(), "n"))
	testutil.Must(t, err)
	return s
}

func (s *Store) give(t *testing.T, id string, ranges []conf.Range) string {
	t.Helper()
	r, err := s.Reserve(t.Context(), id, "eth0", ranges, nil)
	testutil.Must(t, err)
	return join(r.IPs)
}

// Open succeeds if and only if Check succeeds. Check creates nothing.
func TestCheck(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	testutil.Must(t, os.Mkdir(filepath.Join(dir, "there"), 0o700))
	for path, good := range map[string]bool{"there": true, "there/not/yet": true, "file": false, "file/below": false} {
		t.Run(path, func(t *testing.T) {
			path = filepath.Join(dir, path)
			_, before := os.Lstat(path)
			err := Check(path)
			if _, after := os.Lstat(path); (before == nil) != (after == nil) {
				t.Errorf("Check created %s", path)
			}
			_, opened := Open(path)
			if (err == nil) != good || (opened == nil) != good {
				t.Errorf("%s: Check returns %v, Open %v", path, err, opened)
			}
		})
	}
}

// Addresses are assigned in order, and a released one as late as possible. No address is assigned
// twice. The gateway is never assigned.
func TestReserveAssignsInOrder(t *testing.T) {
	t.Parallel()
	s, ranges := newStore(t), small(t)[:1]
	for _, step := range []struct{ give, release, want string }{
		{give: "a", want: "10.0.0.10"}, {give: "b", want: "10.0.0.11"}, {release: "a"}, {give: "c", want: "10.0.0.12"},
		{give: "d", want: "10.0.0.13"}, {give: "e", want: "10.0.0.10"}, {release: "d"}, {give: "f", want: "10.0.0.13"},
	} {
		if step.release != "" {
			r, ok, err := s.Of(step.release, "eth0")
			testutil.Must(t, err)
			if !ok {
				t.Fatalf("%s has none", step.release)
			}
			testutil.Must(t, s.Release(r))
			testutil.Must(t, s.Release(r))
			continue
		}
		if got := s.give(t, step.give, ranges); got != step.want {
			t.Errorf("%s gets %s, want %s", step.give, got, step.want)
		}
	}
	if _, err := s.Reserve(t.Context(), "g", "eth0", ranges, nil); !errors.Is(err, ErrFull) {
		t.Errorf("reserve in a full range: %v", err)
	}
	if _, err := s.Reserve(t.Context(), "f", "eth0", ranges, nil); !errors.Is(err, ErrExists) {
		t.Errorf("a second time: %v", err)
	}
	both := newStore(t)
	for id, want := range map[string]string{"a": "10.0.0.10,fd00::2"} {
		if got := both.give(t, id, small(t)); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if got := both.give(t, "b", small(t)); got != "10.0.0.11,fd00::3" {
		t.Errorf("got %s", got)
	}
	if _, err := both.Reserve(t.Context(), "c", "eth0", small(t), nil); !errors.Is(err, ErrFull) {
		t.Errorf("one family is full: %v", err)
	}
	all, err := both.All()
	testutil.Must(t, err)
	if len(all) != 2 {
		t.Errorf("a reservation that failed is kept: %v", all)
	}
}

// After a power failure the files may have any content. Then no address is assigned twice or lost,
// and the store works.
func TestStoreSurvivesDamagedFiles(t *testing.T) {
	t.Parallel()
	for what, content := range map[string]string{"empty": "", "zeros": "\x00\x00\x00\x00", "torn": `[{"Proto`, "foreign": "10.0.0.99,zz\n", "long": strings.Repeat("x", 1<<12)} {
		t.Run(what, func(t *testing.T) {
			s, ranges := newStore(t), small(t)[:1]
			kept := s.give(t, "a", ranges)
			for _, name := range []string{kept + "@a@eth0", lastName, lockName} {
				testutil.Must(t, os.WriteFile(filepath.Join(s.dir, name), []byte(content), 0o600))
			}
			testutil.Must(t, os.WriteFile(filepath.Join(s.dir, "stranger"), nil, 0o600))
			if got := s.give(t, "b", ranges); got == kept {
				t.Errorf("%s is assigned twice", got)
			}
			r, ok, err := s.Of("a", "eth0")
			testutil.Must(t, err)
			if !ok || join(r.IPs) != kept {
				t.Fatalf("a has %v, want %s", r, kept)
			}
			testutil.Must(t, s.Release(r))
			all, err := s.All()
			testutil.Must(t, err)
			if len(all) != 1 || all[0].ContainerID != "b" {
				t.Errorf("left: %v", all)
			}
		})
	}
}

func TestNote(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.give(t, "a", small(t))
	r, _, err := s.Of("a", "eth0")
	testutil.Must(t, err)
	for _, want := range []string{"", "one", "2"} {
		if want != "" {
			testutil.Must(t, s.SetNote(r, []byte(want)))
		}
		got, err := s.Noted(r)
		testutil.Must(t, err)
		if string(got) != want {
			t.Errorf("noted %q, want %q", got, want)
		}
	}
}

func TestLockExcludesOtherHolders(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	unlock, err := s.Lock(t.Context())
	testutil.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Lock(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("with another holder of the lock: %v", err)
	}
	unlock()
	unlock, err = s.Lock(t.Context())
	testutil.Must(t, err)
	unlock()
}

func TestFileNamesAreParsedBack(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", MaxID)
	for _, r := range []Reservation{
		{"a", "eth0", []netip.Addr{netip.MustParseAddr("10.0.0.2")}},
		{"a.b_c-d", "e@h", []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}},
		{long, "123456789012345", []netip.Addr{netip.MustParseAddr("255.255.255.255"), netip.MustParseAddr("1111:2222:3333:4444:5555:6666:7777:8888")}},
	} {
		t.Run(r.name(), func(t *testing.T) {
			if len(r.name()) > 255 {
				t.Errorf("the name has %d bytes", len(r.name()))
			}
			if back, ok := parse(r.name()); !ok || back.name() != r.name() || back.ContainerID != r.ContainerID || back.IfName != r.IfName {
				t.Errorf("%q is read as %v, %v", r.name(), back, ok)
			}
		})
	}
	for _, name := range []string{"", "lock", "last", "@a@eth0", "10.0.0.2@@eth0", "10.0.0.2@a@", "10.0.0.02@a@eth0", "fe80::1%eth0@a@b", "10.0.0.2,10.0.0.3,10.0.0.4@a@b", "FD00::1@a@b"} {
		if r, ok := parse(name); ok {
			t.Errorf("%q is read as %v", name, r)
		}
	}
}

// FuzzName parses arbitrary file names.
func FuzzName(f *testing.F) {
	f.Add("10.0.0.2,fd00::2@a@eth0")
	f.Add("10.0.0.2@a@b@c")
	f.Fuzz(func(t *testing.T, name string) {
		if r, ok := parse(name); ok && (r.name() != name || len(r.IPs) == 0 || r.ContainerID == "" || r.IfName == "") {
			t.Errorf("%q is read as %v", name, r)
		}
	})
}

func BenchmarkReserve(b *testing.B) {
	n, err := conf.Parse([]byte(`{"cniVersion": "1.1.0", "name": "n", "subnets": ["10.0.0.0/16", "fd00::/64"]}`))
	testutil.Must(b, err)
	s := newStore(b)
	for i := range 250 {
		_, err := s.Reserve(b.Context(), strings.Repeat("a", 60)+string(rune('a'+i%26))+string(rune('a'+i/26)), "eth0", n.Ranges, nil)
		testutil.Must(b, err)
	}
	for b.Loop() {
		r, err := s.Reserve(b.Context(), "new", "eth0", n.Ranges, nil)
		testutil.Must(b, err)
		testutil.Must(b, s.Release(r))
	}
}

// A preferred address is assigned if it is in the range and free. Otherwise the pod gets another
// one.
func TestReservePrefersAddresses(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	n, err := conf.Parse([]byte(`{"cniVersion": "1.1.0", "name": "n", "type": "berth-net", "subnets": ["10.9.0.0/24", "fd09::/120"]}`))
	testutil.Must(t, err)
	wanted := func(texts ...string) (ips []netip.Addr) {
		for _, text := range texts {
			ips = append(ips, netip.MustParseAddr(text))
		}
		return ips
	}
	// Every other address follows the last one of its family.
	for i, test := range []struct {
		name      string
		preferred []netip.Addr
		want      string
	}{
		{"both", wanted("10.9.0.7", "fd09::8"), "10.9.0.7,fd09::8"},
		{"used", wanted("10.9.0.7", "fd09::8"), "10.9.0.8,fd09::9"},
		{"one family", wanted("fd09::20"), "10.9.0.9,fd09::20"},
		{"outside", wanted("10.8.0.9", "fd08::9"), "10.9.0.10,fd09::21"},
		{"gateway", wanted("10.9.0.1", "fd09::1"), "10.9.0.11,fd09::22"},
		{"broadcast", wanted("10.9.0.255", "10.9.0.0"), "10.9.0.12,fd09::23"},
		{"mapped and zoned", wanted("::ffff:10.9.0.77", "fd09::77%eth0"), "10.9.0.13,fd09::24"},
		{"last one", wanted("10.9.0.254"), "10.9.0.254,fd09::25"},
	} {
		r, err := s.Reserve(t.Context(), fmt.Sprint(i), "eth0", n.Ranges, test.preferred)
		if got := join(r.IPs); err != nil || got != test.want {
			t.Errorf("%s: %s, %v, want %s", test.name, got, err, test.want)
		}
	}
}

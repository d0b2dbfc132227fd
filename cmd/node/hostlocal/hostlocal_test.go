package hostlocal

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"berth/cni"
	"berth/internal/testutil"
)

func mustList(t *testing.T, data string) *libcni.NetworkConfigList {
	t.Helper()
	list, err := libcni.NetworkConfFromBytes([]byte(data))
	testutil.Must(t, err)
	return list
}

// ptpList is a network named "net" with addresses of host-local in dataDir.
func ptpList(dataDir string) string {
	return `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "dataDir": "` + dataDir + `"}}, {"type": "portmap"}]}`
}

// writeReservations writes files as host-local does, to the network "net".
func writeReservations(t *testing.T, dataDir string, files map[string]string) {
	t.Helper()
	testutil.Must(t, os.MkdirAll(filepath.Join(dataDir, "net"), 0o700))
	for name, content := range files {
		testutil.Must(t, os.WriteFile(filepath.Join(dataDir, "net", name), []byte(content), 0o600))
	}
}

func TestReservations(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeReservations(t, dir, map[string]string{
		"192.0.2.5": "pod1\r\neth0", "fd00::5": "pod1\r\neth0", "192.0.2.6": "pod2", // host-local before version 0.7
		"lock": "", "last_reserved_ip.0": "192.0.2.6",
	})
	reader := Reader{DefaultDir: t.TempDir()}
	reserved := func(ip, podID string) cni.Reservation {
		return cni.Reservation{File: filepath.Join(dir, "net", ip), IP: ip, PodID: podID}
	}
	want := []cni.Reservation{reserved("192.0.2.5", "pod1"), reserved("192.0.2.6", "pod2"), reserved("fd00::5", "pod1")}
	if got, err := reader.Reservations(mustList(t, ptpList(dir))); err != nil || !slices.Equal(got, want) {
		t.Errorf("reservations are %v, %v", got, err)
	}

	readers, list := cni.Readers{IPAMs: []cni.IPAMReader{reader}}, []byte(ptpList(dir))
	other := []byte(`{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "x", "ipam": {"type": "dhcp"}}]}`)
	if got, err := readers.Reservations(list, list, nil, []byte("{"), other); err != nil || !slices.Equal(got, want) {
		t.Errorf("with repeated and invalid lists reservations are %v, %v", got, err)
	}
	if !readers.KnowsAddressesOf(list) || readers.KnowsAddressesOf(nil) || readers.KnowsAddressesOf(other) {
		t.Error("KnowsAddressesOf is wrong about host-local, no list, or dhcp")
	}
}

func TestHoldsReadsDefaultDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeReservations(t, dir, map[string]string{"192.0.2.5": "reserved\r\neth0"})
	for _, c := range []struct {
		name, dir, pod string
		want           bool
	}{
		{"reserved", dir, "reserved", true},
		{"another pod", dir, "other", false},
		{"no directory", "/nonexistent", "reserved", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := (Reader{DefaultDir: c.dir}).Holds(c.pod); got != c.want || err != nil {
				t.Errorf("Holds is %t, %v", got, err)
			}
		})
	}
}

func TestReleaseOrphansWaitsForLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "10.1.2.3")
	testutil.Must(t, os.WriteFile(path, nil, 0o600)) // host-local may be writing it
	lock, err := os.Create(filepath.Join(dir, "lock"))
	testutil.Must(t, err)
	defer lock.Close()
	testutil.Must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	log := slog.New(slog.DiscardHandler)
	if err := releaseOrphans(ctx, dir, log); err == nil {
		t.Error("succeeded without the lock")
	}
	testutil.Must(t, os.WriteFile(path, []byte("pod\r\neth0"), 0o600))
	testutil.Must(t, lock.Close())
	testutil.Must(t, releaseOrphans(t.Context(), dir, log))
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a reservation is gone: %v", err)
	}
	testutil.Must(t, os.WriteFile(path, nil, 0o600))
	testutil.Must(t, releaseOrphans(t.Context(), dir, log))
	if _, err := os.Stat(path); err == nil {
		t.Error("an empty reservation is still there")
	}
}

// The plugin's DEL does not find a reservation that a power failure emptied. ReleaseOrphans does.
func TestReleaseOrphansOfRealPlugin(t *testing.T) {
	t.Parallel()
	plugin := findPlugin(t)
	dir := t.TempDir()
	conf := `{"cniVersion": "1.0.0", "name": "net", "type": "ptp", "ipam": {"type": "host-local", "dataDir": "` + dir + `", "ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64"}]]}}`
	run := func(verb, id string) {
		t.Helper()
		cmd := exec.Command(plugin)
		cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=/none", "CNI_IFNAME=eth0", "CNI_PATH=" + filepath.Dir(plugin)}
		cmd.Stdin = strings.NewReader(conf)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", verb, err, out)
		}
	}
	list, reader := mustList(t, ptpList(dir)), Reader{DefaultDir: t.TempDir()}
	pods := func() (ids []string) {
		found, err := reader.Reservations(list)
		testutil.Must(t, err)
		for _, r := range found {
			ids = append(ids, r.PodID)
		}
		slices.Sort(ids)
		return ids
	}
	run("ADD", "kept")
	run("ADD", "lost")
	found, err := reader.Reservations(list)
	testutil.Must(t, err)
	for _, r := range found {
		if r.PodID == "lost" {
			testutil.Must(t, os.WriteFile(r.File, make([]byte, len(r.IP)%2*8), 0o600)) // empty, or zeros
		}
	}
	run("DEL", "lost")
	if got := pods(); len(got) != 4 {
		t.Fatalf("DEL released the empty reservations: %q are left, nothing to test", got)
	}
	testutil.Must(t, reader.ReleaseOrphans(t.Context(), list, slog.New(slog.DiscardHandler)))
	if got := pods(); !slices.Equal(got, []string{"kept", "kept"}) {
		t.Errorf("reservations are of %q", got)
	}
}

func findPlugin(t *testing.T) string {
	t.Helper()
	for _, path := range []string{"/opt/cni/bin/host-local", "/usr/lib/cni/host-local"} {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	t.Skip("host-local is not installed (Debian: containernetworking-plugins)")
	return ""
}

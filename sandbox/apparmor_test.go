package sandbox

import (
	"bytes"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"berth/internal/host"
	"berth/internal/task"
)

// fakeProfiles is a kernel with a list of profiles, and a parser that adds to it.
type fakeProfiles struct {
	names    []string
	loads    int
	lost     bool // the parser says it has loaded a profile, and the kernel has none
	askErr   error
	parseErr error
}

func (f *fakeProfiles) loader() profileLoader {
	return profileLoader{
		loaded: func(name string) (bool, error) { return slices.Contains(f.names, name), f.askErr },
		load: func(name string) error {
			f.loads++
			if f.parseErr == nil && !f.lost {
				f.names = append(f.names, name)
			}
			return f.parseErr
		},
	}
}

func TestEnsureAppArmorProfile(t *testing.T) {
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		kernel fakeProfiles
		loads  int
		fresh  bool
		fails  bool
	}{
		"there already":         {kernel: fakeProfiles{names: []string{"other", "p"}}},
		"not there":             {kernel: fakeProfiles{names: []string{"other"}}, loads: 1, fresh: true},
		"the kernel won't tell": {kernel: fakeProfiles{askErr: broken}, fails: true},
		"no parser":             {kernel: fakeProfiles{parseErr: broken}, loads: 1, fails: true},
		"lost":                  {kernel: fakeProfiles{lost: true}, loads: 1, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			fresh, err := test.kernel.loader().ensure("p")
			if fresh != test.fresh || (err != nil) != test.fails || test.kernel.loads != test.loads {
				t.Errorf("got %v, %v after %d loads", fresh, err, test.kernel.loads)
			}
		})
	}
}

// A profile that somebody unloads is loaded again.
func TestEnsureAppArmorProfileAgain(t *testing.T) {
	var kernel fakeProfiles
	for want := 1; want <= 2; want++ {
		for range 2 {
			if _, err := kernel.loader().ensure("p"); err != nil || kernel.loads != want {
				t.Errorf("%d loads, want %d, %v", kernel.loads, want, err)
			}
		}
		kernel.names = nil
	}
}

// Without apparmor_parser containers start all the same, and the log tells of it once.
func TestAppArmorThatCannotBeLoaded(t *testing.T) {
	kernel := fakeProfiles{parseErr: errors.New("no parser")}
	var log bytes.Buffer
	m := &Manager{cfg: Config{Host: &host.Facts{AppArmor: true}}, log: slog.New(slog.NewTextHandler(&log, nil))}
	m.tasks = task.NewRunner(m.log)
	m.appArmor.profileLoader = kernel.loader()
	for range 3 {
		m.ensureAppArmor()
	}
	if kernel.loads != 1 || strings.Count(log.String(), "no parser") != 1 {
		t.Errorf("%d loads, log:\n%s", kernel.loads, log.String())
	}
	m.cfg.Host.AppArmor = false
	m.appArmor.failed.Store(nil)
	if m.ensureAppArmor(); kernel.loads != 1 {
		t.Error("loaded on a host without AppArmor")
	}
}

package lsm

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/moby/profiles/apparmor"

	"berth/internal/task"
	"berth/internal/testutil"
)

// The profile is that of moby/profiles.
func TestDefaultProfileIsMobys(t *testing.T) {
	dir := t.TempDir()
	loaded := filepath.Join(dir, "loaded")
	parser := "#!/bin/sh\n[ \"$1\" = -Kr ] && exec cat ${2:+\"$2\"} >" + loaded + "\n"
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "apparmor_parser"), []byte(parser), 0o700))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	install := func(install func(string) error) string {
		t.Helper()
		testutil.Must(t, install("some-name"))
		text, err := os.ReadFile(loaded)
		testutil.Must(t, err)
		// A template leaves empty lines.
		lines := strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' })
		return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.TrimSpace(l) == "" }), "\n")
	}
	want := install(apparmor.InstallDefault)
	if got := install(installProfile); got != want || !strings.Contains(got, "profile some-name ") {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// fakeProfiles fakes the kernel's list of profiles and the parser.
type fakeProfiles struct {
	names    []string
	loads    int
	lost     bool // the parser succeeds, but the kernel does not list the profile
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
	t.Parallel()
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		kernel fakeProfiles
		loads  int
		fresh  bool
		fails  bool
	}{
		"already loaded":                  {kernel: fakeProfiles{names: []string{"other", "p"}}},
		"not loaded":                      {kernel: fakeProfiles{names: []string{"other"}}, loads: 1, fresh: true},
		"the kernel's list is unreadable": {kernel: fakeProfiles{askErr: broken}, fails: true},
		"no parser":                       {kernel: fakeProfiles{parseErr: broken}, loads: 1, fails: true},
		"lost":                            {kernel: fakeProfiles{lost: true}, loads: 1, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			fresh, err := test.kernel.loader().ensure("p")
			if fresh != test.fresh || (err != nil) != test.fails || test.kernel.loads != test.loads {
				t.Errorf("got %v, %v after %d loads", fresh, err, test.kernel.loads)
			}
		})
	}
}

// A profile that was unloaded is loaded again.
func TestUnloadedProfileIsLoadedAgain(t *testing.T) {
	t.Parallel()
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

// newTestAppArmor returns the AppArmor of a host with AppArmor enabled.
func newTestAppArmor(t *testing.T, loader profileLoader, log *bytes.Buffer) *AppArmor {
	logger := slog.New(slog.NewTextHandler(log, nil))
	a := NewAppArmor(true, task.NewRunner(logger, nil), logger)
	a.kernel = loader
	t.Cleanup(func() {
		if err := a.tasks.Background.WaitFor(time.Minute); err != nil {
			t.Error(err)
		}
	})
	return a
}

// Without apparmor_parser the failure is logged once, and Problem returns it.
func TestAppArmorLoadFailure(t *testing.T) {
	t.Parallel()
	kernel := fakeProfiles{parseErr: errors.New("no parser")}
	var log bytes.Buffer
	a := newTestAppArmor(t, kernel.loader(), &log)
	for range 3 {
		a.Ensure(t.Context())
	}
	if kernel.loads != 1 || strings.Count(log.String(), "no parser") != 1 {
		t.Errorf("%d loads, log:\n%s", kernel.loads, log.String())
	}
	if got := a.Problem(); !strings.Contains(got, "no parser") {
		t.Errorf("problem %q", got)
	}

	later := time.Now().Add(-2 * appArmorRetry)
	a.failed.Store(&profileFailure{at: later, err: kernel.parseErr})
	kernel.parseErr = nil // the parser was installed
	if a.Ensure(t.Context()); kernel.loads != 2 || a.Problem() != "" {
		t.Errorf("%d loads, problem %q", kernel.loads, a.Problem())
	}

	kernel.names = nil
	a.enabled = false
	if a.Ensure(t.Context()); kernel.loads != 2 {
		t.Error("loaded on a host without AppArmor")
	}
}

// Concurrent launches load the profile once, and all wait for it.
func TestAppArmorIsLoadedOnce(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var kernel fakeProfiles
	inner := kernel.loader()
	var log bytes.Buffer
	a := newTestAppArmor(t, profileLoader{
		loaded: func(name string) (bool, error) { mu.Lock(); defer mu.Unlock(); return inner.loaded(name) },
		load:   func(name string) error { mu.Lock(); defer mu.Unlock(); return inner.load(name) },
	}, &log)
	var launches sync.WaitGroup
	for range 20 {
		launches.Go(func() {
			a.Ensure(t.Context())
			mu.Lock()
			defer mu.Unlock()
			if len(kernel.names) == 0 {
				t.Error("a launch did not wait for the profile")
			}
		})
	}
	launches.Wait()
	if kernel.loads != 1 || a.Problem() != "" {
		t.Errorf("%d loads, problem %q", kernel.loads, a.Problem())
	}
}

// A hanging parser delays a launch up to the limit and is not started twice.
func TestAppArmorParserHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		var loads atomic.Int32
		var log bytes.Buffer
		a := newTestAppArmor(t, profileLoader{
			loaded: func(string) (bool, error) { return false, nil },
			load:   func(string) error { loads.Add(1); <-end; return errors.New("ended at last") },
		}, &log)
		for range 2 {
			begin := time.Now()
			a.Ensure(t.Context())
			if waited := time.Since(begin); waited != appArmorTimeout {
				t.Errorf("waited %v", waited)
			}
			if !strings.Contains(a.Problem(), context.DeadlineExceeded.Error()) {
				t.Errorf("problem %q", a.Problem())
			}
			time.Sleep(2 * appArmorRetry) // virtual time
		}
		if loads.Load() != 1 {
			t.Errorf("%d parsers", loads.Load())
		}
		close(end)
	})
}

// When the caller's context ends, no failure of the profile is recorded.
func TestAppArmorCanceledByCaller(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var log bytes.Buffer
	a := newTestAppArmor(t, profileLoader{
		loaded: func(string) (bool, error) { return false, nil },
		load:   func(string) error { cancel(); return errors.New("broken") },
	}, &log)
	a.Ensure(ctx)
	if p := a.Problem(); p != "" {
		t.Errorf("problem %q", p)
	}
}

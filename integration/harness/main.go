package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"k8s.io/klog/v2"

	"berth/integration/fixture"
	"berth/internal/testutil"
)

const (
	// binEnv names the directory of the binaries. If unset, contrib/build makes them.
	binEnv = "BERTH_BIN"
	// machineEnv is the name of the private machine of this process, and of its cgroups.
	machineEnv = "BERTH_MACHINE"
	// buildScript builds the binaries in a checkout.
	buildScript = "contrib/build"
)

// State shared by all tests.
var (
	BinDir    string
	Machine   string            // name of the machine's cgroups
	PluginDir string            // directory of the CNI plugins
	Registry  *fixture.Registry // contains BaseImage; tests that disturb a registry start their own
	BaseImage string            // busybox
)

// Main is a test package's TestMain. It finds or builds the binaries, enters a private machine
// unless it already runs in one, starts the registry, and runs the tests.
func Main(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "integration:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	testutil.MainNeedsRoot()
	if err := findBinaries(); err != nil {
		return 0, err
	}
	if withFailpoints {
		if err := findFailpoints(); err != nil {
			return 0, err
		}
	}
	if Machine = os.Getenv(machineEnv); Machine == "" {
		return 0, enterMachine()
	}
	klog.SetLogger(klog.Logger{}) // cri-client logs each error that it returns

	var err error
	if PluginDir, err = fixture.PluginDir(); err != nil {
		return 0, err
	}
	if Registry, err = fixture.NewRegistry(); err != nil {
		return 0, err
	}
	img, err := fixture.Image(v1.Config{Cmd: []string{"sh"}})
	if err != nil {
		return 0, err
	}
	if BaseImage, err = Registry.Push("base:latest", img); err != nil {
		return 0, err
	}
	code := m.Run()
	return code, Registry.Close()
}

// findBinaries sets BinDir, and builds missing binaries.
func findBinaries() error {
	if BinDir = os.Getenv(binEnv); BinDir != "" {
		return nil
	}
	build := exec.CommandContext(context.Background(), filepath.Join(source(), buildScript))
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", buildScript, err, out)
	}
	var err error
	if BinDir, err = filepath.Abs(filepath.Join(source(), "bin")); err != nil {
		return err
	}
	return os.Setenv(binEnv, BinDir)
}

// enterMachine executes this process again in a private machine.
func enterMachine() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := append([]string{"machine", self}, os.Args[1:]...)
	return fmt.Errorf("enter private machine: %w", syscall.Exec(filepath.Join(source(), "contrib/machine"), args, os.Environ()))
}

// source returns the root of the checkout: the nearest parent of the working directory with a
// go.mod.
func source() string {
	dir, err := os.Getwd()
	for err == nil && dir != "/" {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return "."
}

// Thorough reports whether tests that enumerate cases run all of them, which takes hours. Otherwise
// they run a selection. contrib/torture sets BERTH_TORTURE.
func Thorough() bool { return os.Getenv("BERTH_TORTURE") != "" }

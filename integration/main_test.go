package integration

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
)

const (
	// binEnv names the directory of the binaries; unset, contrib/build makes them.
	binEnv = "BERTH_BIN"
	// machineEnv is the name of the private machine we are in, and of its cgroups.
	machineEnv = "BERTH_MACHINE"
)

// What all tests share.
var (
	binDir    string
	machine   string            // name of the machine's cgroups
	pluginDir string            // the CNI plugins
	registry  *fixture.Registry // holds baseImage; tests that disturb a registry start their own
	baseImage string            // busybox
)

func TestMain(m *testing.M) {
	flag.Parse()
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "integration:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	if isInstalledPlugin() {
		return 0, runInstalledPlugin()
	}
	if os.Geteuid() != 0 {
		return 0, fmt.Errorf("needs root")
	}
	if err := findBinaries(); err != nil {
		return 0, err
	}
	if machine = os.Getenv(machineEnv); machine == "" {
		return 0, enterMachine()
	}
	klog.SetLogger(klog.Logger{}) // cri-client logs each error it returns

	var err error
	if pluginDir, err = fixture.PluginDir(); err != nil {
		return 0, err
	}
	if registry, err = fixture.NewRegistry(); err != nil {
		return 0, err
	}
	img, err := fixture.Image(v1.Config{Cmd: []string{"sh"}})
	if err != nil {
		return 0, err
	}
	if baseImage, err = registry.Push("base:latest", img); err != nil {
		return 0, err
	}
	code := m.Run()
	return code, registry.Close()
}

// findBinaries sets binDir, and builds what is not there.
func findBinaries() error {
	if binDir = os.Getenv(binEnv); binDir != "" {
		return nil
	}
	build := exec.CommandContext(context.Background(), "../contrib/build")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("contrib/build: %w\n%s", err, out)
	}
	var err error
	if binDir, err = filepath.Abs("../bin"); err != nil {
		return err
	}
	return os.Setenv(binEnv, binDir)
}

// enterMachine replaces this process by the same one in a private machine.
func enterMachine() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := append([]string{"machine", self}, os.Args[1:]...)
	return fmt.Errorf("enter private machine: %w", syscall.Exec("../contrib/machine", args, os.Environ()))
}

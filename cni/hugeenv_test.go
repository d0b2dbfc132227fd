package cni

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// hugeEnvironmentVar makes the test binary a process whose environment is huge.
const hugeEnvironmentVar = "BERTH_CNI_TEST_HUGE_ENVIRONMENT"

const hugeEnvironment = 1 << 30 // bytes

// mmMap is struct prctl_mm_map.
type mmMap struct {
	startCode, endCode, startData, endData, startBrk, brk, startStack uint64
	argStart, argEnd, envStart, envEnd                                uint64
	auxv                                                              uint64
	auxvSize                                                          uint32
	exeFD                                                             int32
}

// startHugeEnvironment starts a process of uid 1001 without capabilities, with the test's file
// descriptors.
func (b *bed) startHugeEnvironment() (pid int) {
	b.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{hugeEnvironmentVar + "=1"}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1001, Gid: 1001}, Pdeathsig: unix.SIGKILL}
	out, err := cmd.StdoutPipe()
	testutil.Must(b.t, err)
	testutil.Must(b.t, cmd.Start())
	b.t.Cleanup(func() {
		testutil.Must(b.t, cmd.Process.Kill())
		_ = cmd.Wait() // killed
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		b.t.Fatalf("the process printed %q, %v", line, err)
	}
	return cmd.Process.Pid
}

func haveHugeEnvironment() error {
	memory, err := unix.Mmap(-1, 0, hugeEnvironment, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return err
	}
	m, err := ownMap()
	if err != nil {
		return err
	}
	m.envStart = uint64(uintptr(unsafe.Pointer(&memory[0])))
	m.envEnd = m.envStart + hugeEnvironment
	if err := unix.Prctl(unix.PR_SET_MM, unix.PR_SET_MM_MAP, uintptr(unsafe.Pointer(m)), unsafe.Sizeof(*m), 0); err != nil {
		return fmt.Errorf("PR_SET_MM_MAP: %w", err)
	}
	fmt.Println("ready")
	select {}
}

// ownMap returns the kernel's memory map of this process, from proc_pid_stat(5).
func ownMap() (*mmMap, error) {
	data, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return nil, err
	}
	_, after, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(after)
	field := func(n int) uint64 { // numbered as in the manual
		v, _ := strconv.ParseUint(fields[n-3], 10, 64) // the kernel writes numbers
		return v
	}
	brk, _, _ := unix.Syscall(unix.SYS_BRK, 0, 0, 0)
	return &mmMap{startCode: field(26), endCode: field(27), startStack: field(28), startData: field(45), endData: field(46),
		startBrk: field(47), brk: uint64(brk), argStart: field(48), argEnd: field(49), exeFD: -1}, nil
}

// peakMemory returns this process's peak of resident memory, in bytes.
func peakMemory(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	testutil.Must(t, err)
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.Atoi(strings.Fields(text)[0])
			testutil.Must(t, err)
			return kb << 10
		}
	}
	t.Fatal("no VmHWM in /proc/self/status")
	return 0
}

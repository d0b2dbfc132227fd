package test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// driver is the running program that is asked.
var driver struct {
	in  io.WriteCloser
	out io.Reader
}

func TestMain(m *testing.M) {
	if _, err := exec.LookPath("cc"); err != nil {
		fmt.Fprintln(os.Stderr, "NOT TESTED: there is no C compiler")
		os.Exit(0)
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// programEnv names the driver's program in the workers of a fuzzing test.
const programEnv = "BERTH_MONITOR_DRIVER"

func run(m *testing.M) (code int, err error) {
	program := os.Getenv(programEnv)
	if program == "" {
		dir, tempErr := os.MkdirTemp("", "berth-monitor-test-")
		if tempErr != nil {
			return 1, tempErr
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		program = filepath.Join(dir, "driver")
		if out, err := exec.Command("../build", "-driver", program).CombinedOutput(); err != nil {
			return 1, fmt.Errorf("build the driver: %w\n%s", err, out)
		}
		if err := os.Setenv(programEnv, program); err != nil {
			return 1, err
		}
	}
	return runWith(m, program)
}

func runWith(m *testing.M, program string) (code int, err error) {
	cmd := exec.Command(program)
	cmd.Stderr = os.Stderr
	if driver.in, err = cmd.StdinPipe(); err != nil {
		return 1, err
	}
	if driver.out, err = cmd.StdoutPipe(); err != nil {
		return 1, err
	}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	code = m.Run()
	return code, errors.Join(driver.in.Close(), cmd.Wait()) // what leaks is reported here
}

// ask asks the driver. See driver.c for the kinds of questions.
func ask(t testing.TB, kind byte, parts ...any) []byte {
	t.Helper()
	var question bytes.Buffer
	for _, part := range parts {
		if err := binary.Write(&question, binary.BigEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	message := binary.BigEndian.AppendUint32([]byte{kind}, uint32(question.Len()))
	if _, err := driver.in.Write(append(message, question.Bytes()...)); err != nil {
		t.Fatalf("the driver is gone: %v", err)
	}
	var size [4]byte
	if _, err := io.ReadFull(driver.out, size[:]); err != nil {
		t.Fatalf("the driver has ended: %v", err)
	}
	answer := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(driver.out, answer); err != nil {
		t.Fatalf("the driver has ended: %v", err)
	}
	return answer
}

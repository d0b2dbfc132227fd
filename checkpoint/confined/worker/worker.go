// Package worker is the part of the program berth-verify that compares the files of a checkpoint
// with an expectation.
//
// # Contract
//
// The daemon (package confined) passes a directory of the checkpoint and a request, see package
// wire. The program confines itself (package jail) before it reads either. It can then read the
// files of the directory, and may make only the system calls of Go's runtime. A file that cannot be
// decoded is an error in the answer; a request that cannot be decoded ends the program.
package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"berth/checkpoint/confined/wire"
	"berth/checkpoint/verify"
	"berth/internal/jail"
)

// grant limits the process. The messages of the images take at most a quarter of the memory.
var grant = jail.Grant{Memory: 1 << 30, Files: 64, CPU: 60, ReadOnly: true}

// Main compares the files and returns the exit status: 0 if there was an answer.
func Main() int {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n", err)
		return 1
	}
	return 0
}

func run() error {
	tree := os.NewFile(jail.TreeFD, "tree")
	if tree == nil {
		return errors.New("berth-verify must be started by berth")
	}
	if err := jail.Process(tree, grant, false); err != nil {
		return err
	}
	data, err := io.ReadAll(io.LimitReader(os.Stdin, wire.MaxRequest+1))
	if err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	if len(data) > wire.MaxRequest {
		return fmt.Errorf("request of more than %d bytes", wire.MaxRequest)
	}
	var request wire.Request
	if err := json.Unmarshal(data, &request); err != nil {
		return fmt.Errorf("decode request: %w", err)
	}
	return json.NewEncoder(os.Stdout).Encode(answer(request))
}

// answer compares the files in the root directory.
func answer(request wire.Request) wire.Answer {
	const limit = 1000
	report, err := compare(request)
	if err != nil {
		text := strconv.QuoteToASCII(err.Error())
		return wire.Answer{Error: text[1:min(len(text)-1, limit)]}
	}
	return wire.Answer{Report: report}
}

// compare returns a report without differences, or that of the first file that differs.
func compare(request wire.Request) (*verify.Report, error) {
	if request.Shm != "" {
		return compareTar(request.Shm, verify.Shm)
	}
	if len(request.Permitted) == 0 {
		return nil, errors.New("the request permits nothing")
	}
	report, err := compareTar(request.Layer, func(r io.Reader) ([]verify.Difference, error) {
		return verify.Layer(r, request.Permitted[0].Spec)
	})
	if err != nil || len(report.Differences) > 0 {
		return report, err
	}
	for _, expected := range request.Permitted {
		if report, err = compareImages(request.Images, expected); err != nil || len(report.Differences) == 0 {
			break
		}
	}
	return report, err
}

func compareImages(name string, expected verify.Expected) (*verify.Report, error) {
	dir, err := open(name, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer dir.Close() // it was only read
	return verify.Container(dir, expected)
}

// compareTar compares a tar. A missing tar is empty.
func compareTar(name string, do func(io.Reader) ([]verify.Difference, error)) (*verify.Report, error) {
	file, err := open(name, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return new(verify.Report), nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close() // it was only read
	differences, err := do(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &verify.Report{Differences: differences}, nil
}

// open opens a file of the root directory to read it.
func open(name string, flags int) (*os.File, error) {
	path := "/" + name
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

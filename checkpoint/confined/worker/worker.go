// Package worker is the part of the program berth-verify that compares the images of a checkpoint
// with an expectation.
//
// # Contract
//
// The daemon (package confined) passes the directory of the images and a request, see package wire.
// The program confines itself (package jail) before it reads either. It can then read the files of
// the directory, and may make only the system calls of Go's runtime. An image that cannot be decoded
// is an error in the answer; a request that cannot be decoded ends the program.
package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"berth/checkpoint/confined/wire"
	"berth/checkpoint/verify"
	"berth/internal/jail"
)

// grant limits the process. The messages of the images take at most a quarter of the memory.
var grant = jail.Grant{Memory: 1 << 30, Files: 64, CPU: 60, ReadOnly: true}

// Main compares the images and returns the exit status: 0 if there was an answer.
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
	var expected verify.Expected
	if err := json.Unmarshal(data, &expected); err != nil {
		return fmt.Errorf("decode request: %w", err)
	}
	return json.NewEncoder(os.Stdout).Encode(answer(expected))
}

// answer compares the images in the root directory.
func answer(expected verify.Expected) wire.Answer {
	const limit = 1000
	report, err := compare(expected)
	if err != nil {
		text := strconv.QuoteToASCII(err.Error())
		return wire.Answer{Error: text[1:min(len(text)-1, limit)]}
	}
	return wire.Answer{Report: report}
}

func compare(expected verify.Expected) (*verify.Report, error) {
	root, err := os.Open("/")
	if err != nil {
		return nil, err
	}
	defer root.Close() // it was only read
	return verify.Container(root, expected)
}

// Package worker is the program berth-verify, which verifies the signatures of one image.
//
// # Contract
//
// The daemon (package trust) passes a directory, see package wire. The program confines itself
// (package jail). It can then read the files of the directory. It has no network and no
// capabilities, and may make only the system calls of Go's runtime. Then it parses the documents
// and signatures, which may come from anyone, and writes its verdict. It never accepts an image
// because of an error.
//
// The build tag containers_image_openpgp selects the library's OpenPGP implementation in Go.
// Without the tag the library would need GPGME, so the program then rejects every image.
package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode"

	"berth/image/trust/wire"
	"berth/internal/jail"
)

// grant limits the process. Verification takes a few megabytes and milliseconds.
var grant = jail.Grant{Memory: 512 << 20, Files: 64, CPU: 30, ReadOnly: true}

// Main returns the exit status: 0 if there was a verdict.
func Main(args []string) int {
	if err := run(args); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n", err)
		return 1
	}
	return 0
}

func run(args []string) error {
	if len(args) != 1 || args[0] != wire.Version {
		return errors.New("berth-verify must be started by a berth of the same version")
	}
	tree := os.NewFile(wire.TreeFD, "tree")
	if tree == nil {
		return errors.New("berth-verify must be started by berth")
	}
	if err := jail.Process(tree, grant, false); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(verdictOf(verify("/")))
}

// verdictOf returns the verdict for the result of verify, with a printable reason.
func verdictOf(err error) wire.Verdict {
	if err == nil {
		return wire.Verdict{Accepted: true}
	}
	const limit = 1000
	reason := strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, err.Error())
	return wire.Verdict{Reason: strings.ToValidUTF8(reason[:min(len(reason), limit)], "")}
}

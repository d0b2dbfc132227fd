// Package worker is the program berth-verify, which verifies the signatures of one image.
//
// # Contract
//
// The daemon (package trust) starts the program (package jail) with a tree of files (PolicyFile and
// the constants after it). The program confines itself. It can then read the files of the tree. It
// has no network and no capabilities, and may make only the system calls of Go's runtime. Then it
// parses the documents and signatures, which may come from anyone, and writes a Verdict as JSON to
// standard output. It never accepts an image because of an error.
//
// The build tag containers_image_openpgp selects the library's OpenPGP implementation in Go.
// Without the tag the library would need GPGME, so the program then rejects every image.
package worker

import (
	"encoding/json"
	"os"
	"strings"
	"unicode"

	"berth/internal/jail"
)

// grant limits the process. Verification takes a few megabytes and milliseconds.
var grant = jail.Grant{Memory: 512 << 20, Files: 64, CPU: 30, ReadOnly: true}

// Main returns the exit status: 0 if there was a verdict.
func Main() int { return jail.Main("berth-verify", Version, run) }

func run(_ []string, tree *os.File) error {
	if err := jail.Process(tree, grant, false); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(verdictOf(verify("/")))
}

// verdictOf returns the verdict for the result of verify, with a printable reason.
func verdictOf(err error) Verdict {
	if err == nil {
		return Verdict{Accepted: true}
	}
	const limit = 1000
	reason := strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, err.Error())
	return Verdict{Reason: strings.ToValidUTF8(reason[:min(len(reason), limit)], "")}
}

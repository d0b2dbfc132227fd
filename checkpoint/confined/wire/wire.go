// Package wire is what berth and berth-verify exchange about a checkpoint: a request on standard
// input and an answer on standard output, both JSON. The files are in the program's directory.
package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"berth/checkpoint/verify"
)

// Version changes with every change of the exchange. It is the program's only argument.
const Version = "checkpoint-2"

// Limits of the messages, in bytes.
const (
	MaxRequest = 32 << 20
	MaxAnswer  = 4 << 20
)

// Limits of an answer's parts.
const (
	maxList = 1000
	maxText = 4 << 10
)

// Request says what to compare. Names are those of files in the program's directory. Missing tars
// are empty.
type Request struct {
	// Images is the directory of a container's images, Layer the tar of its writable layer.
	// Permitted is what they may have: one for each filter that a launcher could load for the
	// container.
	Images    string            `json:"images,omitempty"`
	Layer     string            `json:"layer,omitempty"`
	Permitted []verify.Expected `json:"permitted,omitempty"`
	// Shm is the tar of a pod's /dev/shm.
	Shm string `json:"shm,omitempty"`
}

// Answer is the program's answer. Exactly one field is set.
type Answer struct {
	Report *verify.Report `json:"report,omitempty"`
	Error  string         `json:"error,omitempty"` // the files could not be read
}

// ParseAnswer decodes an answer strictly. Anything but one complete answer within its limits is an
// error. An answer comes from a program that has read hostile images.
func ParseAnswer(data []byte) (Answer, error) {
	var a Answer
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&a); err != nil {
		return Answer{}, fmt.Errorf("decode answer: %w", err)
	}
	if d.More() {
		return Answer{}, errors.New("decode answer: more than one")
	}
	if (a.Report == nil) == (a.Error == "") {
		return Answer{}, errors.New("decode answer: not one of report and error")
	}
	return a, a.check()
}

// check returns an error for impossible lengths.
func (a Answer) check() error {
	texts := []string{a.Error}
	if r := a.Report; r != nil {
		if len(r.Differences) > maxList || len(r.Processes) > maxList || len(r.Sockets) > maxList || r.More < 0 ||
			r.Memory < 0 || r.OpenFiles < 0 || r.More > 0 && len(r.Differences) == 0 {
			return errors.New("decode answer: impossible report")
		}
		texts = append(texts, r.Sockets...)
		for _, d := range r.Differences {
			texts = append(texts, d.Field, d.Archive, d.Expected)
		}
		for _, p := range r.Processes {
			texts = append(texts, p.Command)
		}
	}
	for _, text := range texts {
		if len(text) > maxText || !printable(text) {
			return errors.New("decode answer: a text is too long or not printable")
		}
	}
	return nil
}

// printable reports whether a text can be shown: ASCII, and the ellipsis of package verify.
func printable(text string) bool {
	for _, r := range text {
		if (r < ' ' || r > '~') && r != '…' {
			return false
		}
	}
	return true
}

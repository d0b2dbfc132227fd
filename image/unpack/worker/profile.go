package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"

	"berth/image/profile"
	"berth/internal/jail"
	"berth/internal/jail/early"
)

// ProfileArgs are the arguments for the check of one seccomp profile. The process reads the profile
// from standard input and writes a ProfileAnswer as JSON.
func ProfileArgs() []string { return []string{toCheck} }

// MaxProfileAnswer limits the answer, in bytes.
const MaxProfileAnswer = 2 * profile.MaxSize

// profileHeap is Go's memory limit. The decoded form of the largest profile fits.
const profileHeap = 128 << 20

// ProfileAnswer has either the canonical encoding of the profile or the reason of a refusal.
type ProfileAnswer struct {
	Profile json.RawMessage `json:"profile,omitempty"`
	Reason  string          `json:"reason,omitempty"`
}

// ReadProfile decodes an answer, which may be hostile.
func ReadProfile(from io.Reader) (answer ProfileAnswer, err error) {
	data, err := io.ReadAll(io.LimitReader(from, MaxProfileAnswer+1))
	switch {
	case err != nil:
		return answer, err
	case len(data) > MaxProfileAnswer:
		return answer, errors.New("answer is too long")
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return answer, err
	}
	if (answer.Profile == nil) == (answer.Reason == "") {
		return answer, errors.New("answer has neither a profile nor a reason, or both")
	}
	return answer, nil
}

func runProfile(args []string, root *os.File) error {
	if len(args) != 1 {
		return fmt.Errorf("%d arguments", len(args))
	}
	debug.SetMemoryLimit(profileHeap)
	grant := jail.Grant{Memory: addresses + 2*profileHeap, Files: fileLimit, OnlyData: true, CPU: 30}
	if err := jail.Process(root, grant, early.Done); err != nil {
		return err
	}
	data, err := io.ReadAll(io.LimitReader(os.Stdin, profile.MaxSize+1))
	if err != nil {
		return fmt.Errorf("read profile: %w", err)
	}
	var answer ProfileAnswer
	if answer.Profile, err = profile.Parse(data); err != nil {
		answer = ProfileAnswer{Reason: err.Error()}
	}
	return json.NewEncoder(os.Stdout).Encode(answer)
}

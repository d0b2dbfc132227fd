// Package confined runs package verify in the program berth-verify, which can read one directory
// and do nothing else.
//
// # Contract
//
// The daemon passes the images' directory as a read-only mount and the expectation on standard
// input. It decodes the answer strictly. A program that dies, exceeds its limits or violates the
// protocol is an error, never a report. When Verify returns, the program has ended.
//
// A bug in the decoders could let images decide the answer. The images can then say no more than
// "no difference", so the other defenses of a restore still hold.
package confined

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/confined/wire"
	"berth/checkpoint/verify"
	"berth/internal/errdefs"
	"berth/internal/jail/program"
)

// timeout limits a run of berth-verify, which takes milliseconds.
const timeout = 2 * time.Minute

// Verify compares the images in the directory dir with what is expected. path is that of
// berth-verify. Images that cannot be read are InvalidArgument; other errors are Internal or those of
// ctx.
func Verify(ctx context.Context, path string, dir *os.File, expected verify.Expected) (*verify.Report, error) {
	request, err := json.Marshal(expected)
	if err != nil {
		return nil, fmt.Errorf("encode request for berth-verify: %w", err)
	}
	if len(request) > wire.MaxRequest {
		return nil, errdefs.FailedPrecondition("verify checkpoint: the container's configuration has %d bytes", len(request))
	}
	tree, err := program.Clone(dir)
	if err != nil {
		return nil, errdefs.Internal("verify checkpoint: %w", err)
	}
	defer tree.Close() // the kernel then drops the mount
	if err := program.Restrict(tree, unix.MOUNT_ATTR_RDONLY); err != nil && !errors.Is(err, unix.ENOSYS) {
		return nil, errdefs.Internal("verify checkpoint: %w", err)
	}
	data, err := program.Run(ctx, program.Command{Name: "berth-verify", Path: path, Args: []string{wire.Version},
		Tree: tree, Input: request, MaxOutput: wire.MaxAnswer, Timeout: timeout})
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, errdefs.Internal("verify checkpoint: %w", err)
	}
	answer, err := wire.ParseAnswer(data)
	if err != nil {
		return nil, errdefs.Internal("verify checkpoint: %w", err)
	}
	if answer.Error != "" {
		return nil, errdefs.InvalidArgument("verify checkpoint: %s", answer.Error)
	}
	return answer.Report, nil
}

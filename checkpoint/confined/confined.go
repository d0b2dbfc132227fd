// Package confined runs package verify in the program berth-verify, which can read one directory
// and do nothing else.
//
// # Contract
//
// The daemon passes a directory of the checkpoint as a read-only mount and the expectation on
// standard input. It decodes the answer strictly. A program that dies, exceeds its limits or
// violates the protocol is an error, never a report. When a function returns, the program has
// ended.
//
// A bug in the decoders could let files decide the answer. They can then say no more than "no
// difference", so the other defenses of a restore still hold.
package confined

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/archive"
	"berth/checkpoint/confined/wire"
	"berth/checkpoint/verify"
	"berth/internal/errdefs"
	"berth/internal/jail/program"
)

// timeout limits a run of berth-verify, which takes milliseconds.
const timeout = 2 * time.Minute

// Container compares the files of a container, in its directory dir of a checkpoint, with what is
// permitted: its images and its writable layer. There is one expectation for each filter that a
// launcher could load; the images must fit one of them. path is that of berth-verify.
//
// Files that cannot be read are InvalidArgument; other errors are Internal or those of ctx.
func Container(ctx context.Context, path string, dir *os.File, permitted []verify.Expected) (*verify.Report, error) {
	request := wire.Request{Images: archive.ImagesDir, Layer: archive.RootfsDiffFile, Permitted: permitted}
	return compare(ctx, path, dir, request)
}

// Shm compares the content of a pod's /dev/shm, in the directory dir of a checkpoint, with what all
// pods may have. Arguments and errors are those of Container.
func Shm(ctx context.Context, path string, dir *os.File) (*verify.Report, error) {
	return compare(ctx, path, dir, wire.Request{Shm: archive.ShmFile})
}

func compare(ctx context.Context, path string, dir *os.File, r wire.Request) (*verify.Report, error) {
	request, err := json.Marshal(r)
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

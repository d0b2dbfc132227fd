package process

import (
	"context"
	"fmt"
	"os"

	"berth/image/profile"
	"berth/image/unpack/worker"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// CheckProfile checks a seccomp profile in a separate process, and returns its canonical encoding.
// dir becomes the root directory of the process. A refused profile is InvalidArgument with the
// prefix SecurityProfileInvalid. The error is Unavailable if the process gave no answer in time,
// and Internal if its answer is not what profile.Parse returns. Only one check runs at a time,
// because a hostile profile takes much memory.
func (p *Program) CheckProfile(ctx context.Context, dir string, data []byte) ([]byte, error) {
	root, err := os.Open(dir)
	if err != nil {
		return nil, errdefs.Internal("start berth-unpack: %w", err)
	}
	defer root.Close() // read only
	select {
	case p.checking <- struct{}{}:
		defer func() { <-p.checking }()
	case <-ctx.Done():
		return nil, fmt.Errorf("check profile: %w", ctx.Err())
	}
	failpoint.Reach("unpack.start-check")
	w, err := p.start(root, true, worker.ProfileArgs(), nil)
	failpoint.Reach("unpack.check-started")
	if err != nil {
		return nil, errdefs.Internal("start berth-unpack: %w", err)
	}
	defer w.End()
	ctx, cancel := context.WithTimeout(ctx, p.stall)
	defer cancel()
	defer context.AfterFunc(ctx, w.Kill)()
	_, err = w.In.Write(data)
	if err == nil {
		err = w.In.Close()
	}
	var answer worker.ProfileAnswer
	if err == nil {
		answer, err = worker.ReadProfile(w.Out)
	}
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("check profile: %w", context.Cause(ctx))
	case err != nil:
		return nil, errdefs.Unavailable("check profile: berth-unpack: %w", err)
	case answer.Reason != "":
		return nil, profile.Refused(answer.Reason)
	}
	if err := profile.Confirm(answer.Profile); err != nil {
		return nil, errdefs.Internal("check profile: berth-unpack answered with a profile that it must refuse: %v", err)
	}
	return answer.Profile, nil
}

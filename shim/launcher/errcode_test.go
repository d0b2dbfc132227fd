package launcher

import (
	"errors"
	"fmt"
	"testing"

	"berth/shim/proto"
)

func TestToReply(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		code proto.Code
		text string
	}{
		"command": {
			errors.New(`start container c: unable to start container process: error during container init: exec: "no": executable file not found in $PATH`),
			proto.InvalidArgument, `start container c: exec: "no": executable file not found in $PATH`,
		},
		"working directory": {
			errors.New(`error executing setns process: chdir to cwd ("/x") set in config.json failed: no such file or directory`),
			proto.InvalidArgument, `chdir to cwd ("/x") failed: no such file or directory`,
		},
		"own code": {fmt.Errorf("outer: %w", proto.Errorf(proto.FailedPrecondition, "inner %d", 1)), proto.FailedPrecondition, "outer: inner 1"},
		"other":    {errors.New("anything else"), proto.Internal, "anything else"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := toReply(test.err); got.Code != test.code || got.Message != test.text {
				t.Errorf("toReply = %d, %q; want %d, %q", got.Code, got.Message, test.code, test.text)
			}
		})
	}
}

package complaint

import (
	"errors"
	"fmt"
	"testing"

	"berth/shim/proto"
)

func TestDescribe(t *testing.T) {
	for _, tt := range []struct {
		err  error
		code proto.Code
		text string
	}{
		{errors.New(`start container c: unable to start container process: error during container init: exec: "no": executable file not found in $PATH`),
			proto.InvalidArgument, `start container c: exec: "no": executable file not found in $PATH`},
		{errors.New(`error executing setns process: chdir to cwd ("/x") set in config.json failed: no such file or directory`),
			proto.InvalidArgument, `chdir to cwd ("/x") failed: no such file or directory`},
		{fmt.Errorf("outer: %w", proto.Errorf(proto.FailedPrecondition, "inner %d", 1)), proto.FailedPrecondition, "outer: inner 1"},
		{errors.New("anything else"), proto.Internal, "anything else"},
	} {
		if got := Describe(tt.err); got.Code != tt.code || got.Message != tt.text {
			t.Errorf("describe(%q) = %d, %q; want %d, %q", tt.err, got.Code, got.Message, tt.code, tt.text)
		}
	}
}

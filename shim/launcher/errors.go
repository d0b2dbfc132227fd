package launcher

import (
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/shim/control"
)

// What happens in the container's init reaches us as text only.
var (
	// exec.LookPath and execve on the container's command: it is named in quotes.
	badCommand = regexp.MustCompile(`exec: "`)
	badCwd     = regexp.MustCompile(`chdir to cwd \(.*\) set in config.json failed: `)

	// Steps of libcontainer that say nothing to who reads the message.
	noise = []string{
		"unable to start container process: ",
		"error during container init: ",
		"error executing setns process: ",
	}
)

// describe gives an error of libcontainer's the code and the text that the daemon
// passes on.
func describe(err error) *control.Error {
	code := errdefs.Code(err)
	text := err.Error()
	if code == codes.Unknown {
		code = codes.Internal
		if badCommand.MatchString(text) || badCwd.MatchString(text) {
			code = codes.InvalidArgument
		}
	}
	for _, n := range noise {
		text = strings.ReplaceAll(text, n, "")
	}
	text = strings.ReplaceAll(text, "set in config.json failed", "failed")
	return &control.Error{Code: code, Message: text}
}

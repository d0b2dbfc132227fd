package launcher

import (
	"errors"
	"slices"
	"strings"

	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// libcontainer reports errors of the container's init as text only.
const (
	// Errors of exec.LookPath and execve about the container's command, which they quote.
	badCommand = `exec: "`
	badCwd     = `chdir to cwd (`
	// A working directory below something that is no directory.
	makeCwd      = "mkdir "
	notDirectory = ": not a directory"
	// A sysctl whose value the kernel refuses.
	badSysctl = "failed to write sysctl "
	badValue  = ": invalid argument"
)

// runtimeRequestErrors are parts of OCI runtimes' texts for the same errors.
var runtimeRequestErrors = []string{
	"executable file `",                // crun: not found in $PATH
	"open executable: ",                // crun: a directory, or a file without execute permission
	"` is not a regular file",          // the same, crun 1.21
	"chdir `",                          // crun: chdir to the working directory
	"chdir to `",                       // the same, crun 1.21
	"error finding executable ",        // runsc
	"failed to load ",                  // runsc: a file that is no program
	"initial process failed to start ", // runsc
	"was not found",                    // Kata's agent: the file … was not found
	badCommand, badCwd,                 // runc
}

// isRequestError returns whether an OCI runtime blames the command or directory that it was asked
// to run.
func isRequestError(err error) bool {
	var e *ociruntime.Error
	return errors.As(err, &e) && slices.ContainsFunc(runtimeRequestErrors,
		func(s string) bool { return strings.Contains(e.Message, s) })
}

// withoutNoise removes the parts of libcontainer's texts that do not help the reader.
var withoutNoise = strings.NewReplacer(
	"unable to start container process: ", "",
	"error during container init: ", "",
	"error executing setns process: ", "",
	"set in config.json failed", "failed",
)

// toReply converts an error to the code and text that the daemon returns to its client.
func toReply(err error) *proto.Error {
	code := proto.Internal
	text := err.Error()
	var own *proto.Error
	switch {
	case errors.As(err, &own):
		code = own.Code
	case isRequestError(err):
		code = proto.InvalidArgument
	case strings.Contains(text, badCommand), strings.Contains(text, badCwd),
		strings.Contains(text, makeCwd) && strings.HasSuffix(text, notDirectory),
		strings.Contains(text, badSysctl) && strings.HasSuffix(text, badValue):
		code = proto.InvalidArgument
	}
	return &proto.Error{Code: code, Message: withoutNoise.Replace(text)}
}

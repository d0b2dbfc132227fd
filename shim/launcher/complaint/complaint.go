// Package complaint finds out what kind of error libcontainer, or an OCI runtime's program, tells of.
package complaint

import (
	"errors"
	"slices"
	"strings"

	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// What happens in the container's init reaches us as text only.
const (
	// exec.LookPath and execve on the container's command: it is named in quotes.
	badCommand = `exec: "`
	badCwd     = `chdir to cwd (`
	// Making the working directory below something that is no directory.
	makeCwd      = "mkdir "
	notDirectory = ": not a directory"
	// A sysctl whose value the kernel refuses.
	badSysctl = "failed to write sysctl "
	badValue  = ": invalid argument"
)

// programComplaints are the same of runtimes that are programs, in their words.
var programComplaints = []string{
	"executable file `",                // crun: not found in $PATH
	"open executable: ",                // crun: a folder, a file that nobody may execute
	"` is not a regular file",          // the same, crun 1.21
	"chdir `",                          // crun: to the working directory
	"chdir to `",                       // the same, crun 1.21
	"error finding executable ",        // runsc
	"failed to load ",                  // runsc: what is no program
	"initial process failed to start ", // runsc
	badCommand, badCwd,                 // runc
}

// IsOfRequest tells whether a runtime complains of what it was asked to run.
func IsOfRequest(err error) bool {
	var e *ociruntime.Error
	return errors.As(err, &e) && slices.ContainsFunc(programComplaints, func(s string) bool { return strings.Contains(e.Message, s) })
}

// noise is text of libcontainer's that says nothing to who reads the message.
var noise = strings.NewReplacer(
	"unable to start container process: ", "",
	"error during container init: ", "",
	"error executing setns process: ", "",
	"set in config.json failed", "failed",
)

// Describe gives an error of libcontainer's the code and the text that the daemon
// passes on.
func Describe(err error) *proto.Error {
	code := proto.Internal
	text := err.Error()
	var own *proto.Error
	switch {
	case errors.As(err, &own):
		code = own.Code
	case IsOfRequest(err):
		code = proto.InvalidArgument
	case strings.Contains(text, badCommand), strings.Contains(text, badCwd),
		strings.Contains(text, makeCwd) && strings.HasSuffix(text, notDirectory),
		strings.Contains(text, badSysctl) && strings.HasSuffix(text, badValue):
		code = proto.InvalidArgument
	}
	return &proto.Error{Code: code, Message: noise.Replace(text)}
}

package client

import (
	"context"
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is the failure of a call: one line of text and the gRPC code.
// errors.Is matches context.Canceled and context.DeadlineExceeded.
type Error struct{ status *status.Status }

func newError(err error) *Error { return &Error{status: status.Convert(err)} }

// Explain prefixes err with the operation, unless the runtime's message already begins with it.
// what is the operation and the object's name. Many messages of runtimes begin with the same
// operation and the object's ID, which Explain drops. It shortens all other IDs.
func Explain(what string, err error) error {
	text := longID.ReplaceAllStringFunc(err.Error(), shortenID)
	if strings.Contains(text, what) {
		return &explained{text, err}
	}
	operation := what[:strings.LastIndexByte(what, ' ')+1]
	own := regexp.MustCompile(`^([a-z ]+: )?` + regexp.QuoteMeta(operation) + `(container )?[0-9a-f]{12,64}: `)
	return &explained{what + ": " + own.ReplaceAllString(text, ""), err}
}

// explained is an error with another text.
type explained struct {
	text string
	err  error
}

func (e *explained) Error() string { return e.text }
func (e *explained) Unwrap() error { return e.err }

// words explain codes to people who do not know gRPC.
var words = map[codes.Code]string{
	codes.Canceled:           "cancelled",
	codes.InvalidArgument:    "invalid request",
	codes.DeadlineExceeded:   "timed out",
	codes.NotFound:           "not found",
	codes.AlreadyExists:      "already exists",
	codes.PermissionDenied:   "permission denied",
	codes.ResourceExhausted:  "out of resources",
	codes.FailedPrecondition: "not possible in this state",
	codes.Aborted:            "aborted",
	codes.OutOfRange:         "out of range",
	codes.Unimplemented:      "not supported by this runtime",
	codes.Internal:           "internal error of the runtime",
	codes.Unavailable:        "not available",
	codes.DataLoss:           "wrong or damaged data",
	codes.Unauthenticated:    "not authorised",
}

// longID matches the full ID of a container, pod or image, and the digest in an image's reference.
var longID = regexp.MustCompile(`@?\b(sha256:)?[0-9a-f]{64}\b`)

// shortenID shortens an ID. It does not shorten the digest in a reference, which would then name
// another image.
func shortenID(match string) string {
	if strings.HasPrefix(match, "@") {
		return match
	}
	return ShortID(match)
}

// Error returns the runtime's message on one line, with short IDs, prefixed with the meaning of its
// code unless the message contains it.
func (e *Error) Error() string {
	message := strings.Join(strings.FieldsFunc(e.status.Message(), isLineBreak), "; ")
	message = longID.ReplaceAllStringFunc(message, shortenID)
	meaning := words[e.status.Code()]
	switch {
	case message == "" && meaning == "":
		return "unknown error"
	case message == "":
		return meaning
	case meaning == "" || strings.Contains(strings.ToLower(message), meaning):
		return message
	}
	return meaning + ": " + message
}

func isLineBreak(r rune) bool { return r == '\n' || r == '\r' }

// GRPCStatus lets status.Code and errdefs.Code find the code.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Is makes the error match the context error that ended the call.
func (e *Error) Is(target error) bool {
	switch e.status.Code() {
	case codes.Canceled:
		return target == context.Canceled
	case codes.DeadlineExceeded:
		return target == context.DeadlineExceeded
	}
	return false
}

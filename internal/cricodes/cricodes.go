// Package answers says with which gRPC codes each method of CRI v1 may refuse what a
// client asks for. It is for tests: those that send odd requests, to the server alone
// and to a whole daemon, hold both to the same list.
//
// Not in it are the codes for trouble that no request causes: Internal, Unknown (with the
// exception that Allowed knows) and DataLoss are always a fault of ours or of the machine, and Canceled is the client's own.
package cricodes

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Methods that have no entry never fail: they answer what is there at the moment.
var refusals = map[string][]codes.Code{
	"RunPodSandbox":    {codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	"StopPodSandbox":   {codes.InvalidArgument},
	"RemovePodSandbox": {codes.InvalidArgument},
	"PodSandboxStatus": {codes.InvalidArgument, codes.NotFound},
	"PodSandboxStats":  {codes.InvalidArgument, codes.NotFound},

	"CreateContainer":    {codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition},
	"StartContainer":     {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition},
	"StopContainer":      {codes.InvalidArgument},
	"RemoveContainer":    {codes.InvalidArgument},
	"ContainerStatus":    {codes.InvalidArgument, codes.NotFound},
	"ContainerStats":     {codes.InvalidArgument, codes.NotFound},
	"ReopenContainerLog": {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition},

	"UpdateContainerResources":  {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition},
	"UpdatePodSandboxResources": {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition},
	"UpdateRuntimeConfig":       {codes.InvalidArgument},

	"ExecSync":    {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.DeadlineExceeded}, // of the command
	"Exec":        {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},
	"Attach":      {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},
	"PortForward": {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},

	"ListImages":   {codes.InvalidArgument},
	"StreamImages": {codes.InvalidArgument},
	"ImageStatus":  {codes.InvalidArgument},
	"RemoveImage":  {codes.InvalidArgument},
	"PullImage": {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition,
		codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted}, // the registry's

	"CheckpointContainer": {codes.Unimplemented},
	"CheckpointPod":       {codes.Unimplemented},
	"RestorePod":          {codes.Unimplemented},
}

// unavailable begins the text of errors that kubelet knows by it (images.ErrRegistryUnavailable). It looks for
// it only in those with the code Unknown.
const unavailable = "RegistryUnavailable: "

// Allowed reports whether a method, "StopContainer" for one, may answer with a code, and an error's text, because
// of what it was asked.
func Allowed(method string, code codes.Code, text string) bool {
	if method == "PullImage" && code == codes.Unknown {
		return strings.HasPrefix(text, unavailable)
	}
	return code == codes.OK && !slices.Contains(refusals[method], codes.Unimplemented) || slices.Contains(refusals[method], code)
}

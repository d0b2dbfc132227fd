// Package cricodes lists the gRPC codes with which each method of CRI v1 may refuse a request. It
// is for tests that send odd requests to the server alone or to a whole daemon.
//
// The list lacks codes of failures that no request causes: Internal, Unknown (with the exception in
// Allowed) and DataLoss are always a fault of berth or the machine, and Canceled is the client's
// own.
package cricodes

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Methods without an entry never fail: they report the current state.
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

	"ExecSync": {
		codes.InvalidArgument,
		codes.NotFound,
		codes.FailedPrecondition,
		codes.DeadlineExceeded, // the command's timeout
	},
	"Exec":        {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},
	"Attach":      {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},
	"PortForward": {codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted},

	"ListImages":   {codes.InvalidArgument},
	"StreamImages": {codes.InvalidArgument},
	"ImageStatus":  {codes.InvalidArgument},
	"RemoveImage":  {codes.InvalidArgument},
	"PullImage": {
		codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition,
		// Codes of the registry.
		codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted,
	},

	"CheckpointContainer": {codes.Unimplemented},
	"CheckpointPod":       {codes.Unimplemented},
	"RestorePod":          {codes.Unimplemented},
}

// unavailable is the prefix of errors that kubelet recognizes (images.ErrRegistryUnavailable).
// kubelet only looks for it in errors with code Unknown.
const unavailable = "RegistryUnavailable: "

// Allowed reports whether a method, for example "StopContainer", may answer with this code and
// error text because of its request.
func Allowed(method string, code codes.Code, text string) bool {
	if method == "PullImage" && code == codes.Unknown {
		return strings.HasPrefix(text, unavailable)
	}
	return code == codes.OK && !slices.Contains(refusals[method], codes.Unimplemented) ||
		slices.Contains(refusals[method], code)
}

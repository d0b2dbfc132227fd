package errdefs

import (
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// refusals lists the gRPC codes with which each method of CRI v1 may refuse a request. Methods
// without an entry never fail, because they report the current state.
//
// The list lacks the codes of failures that no request causes. Internal, Unknown (except in
// Allowed) and DataLoss report a fault of berth or the machine. Canceled comes from the client.
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

	"PullImage":           pullRefusals,
	"PullSecurityProfile": pullRefusals,

	"RemoveSecurityProfile": {codes.InvalidArgument},

	"CheckpointContainer": {
		codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition,
		codes.DeadlineExceeded, codes.ResourceExhausted, codes.Unavailable,
	},
	"CheckpointPod": {
		codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition,
		codes.DeadlineExceeded, codes.ResourceExhausted, codes.Unavailable,
	},
	"RestorePod": {
		codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition,
		codes.ResourceExhausted, // the limits of berth-unpack
	},
}

// pullRefusals are the codes of pulls. The last three are the registry's.
var pullRefusals = []codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition,
	codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted,
}

// unavailable is the prefix of errors that kubelet recognizes (images.ErrRegistryUnavailable), but
// only in errors with code Unknown.
const unavailable = "RegistryUnavailable: "

// Allowed reports whether a request may cause a method, for example "StopContainer", to answer with
// this code and error text. It serves tests that send malformed requests.
func Allowed(method string, code codes.Code, text string) bool {
	if strings.HasPrefix(method, "Pull") && code == codes.Unknown {
		return strings.HasPrefix(text, unavailable)
	}
	return code == codes.OK && !slices.Contains(refusals[method], codes.Unimplemented) ||
		slices.Contains(refusals[method], code)
}

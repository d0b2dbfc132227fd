// Package profile checks seccomp profiles that are published as OCI artifacts (KEP-6061).
//
// An artifact is an OCI image manifest with exactly one layer, which holds the seccomp JSON of the
// runtime specification. The config's media type, or the manifest's artifactType, is MediaType.
// CheckManifest checks the manifest and Parse the layer. Both work on bytes whose digest the caller
// has verified, and both refuse what they do not know. A refusal is permanent: it has the code
// InvalidArgument, and its text begins with SecurityProfileInvalid, so that the kubelet does not
// retry the pull.
//
// Package pull fetches the artifact, and a confined berth-unpack runs Parse.
//
// Store keeps what Parse returned as records, which survive a power cut. It keeps every reference
// until the profile is removed, and refuses more profiles beyond its limits.
package profile

// Package checkpoint has no code. The word means two things, each in a package of its own:
//
//   - checkpoint/record: the durable record of a pod, container or image, as in the kubelet's
//     "checkpoint files". A daemon that starts again reads them.
//   - checkpoint/process: the saved processes of a container or pod (KEP-2008, KEP-5823), as files.
package checkpoint

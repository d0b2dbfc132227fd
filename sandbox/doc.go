// Package sandbox owns pods and their containers: their state, their resources on the host, and
// their lifecycle.
//
// Four types explain the rest:
//
//   - pod and container (objects.go): each pod and each container of the node is one object. It has
//     a Spec, which is decided once and recorded. It also has a Status, which only the holder of
//     its lock can access. Clients see its snapshot.
//   - control (control.go) locks objects, publishes them, stops containers and changes their
//     limits. Clients and NRI plugins use the same control.
//   - Manager (manager.go) orders the steps of each operation. A call from the server arrives here:
//     pod.go and pod_end.go for pods, container.go and container_run.go for containers.
//   - parts (parts.go) has the components that the steps call: Starter, Network, Images and others.
//     interfaces.go declares them. The packages that implement them do not import this package, so
//     tests replace each with a fake that fails at any call.
//
// All operations have the same structure, for example:
//
//	StartContainer      find the container, continue if the client leaves (Tasks.Detach)
//	  lockContainer     one operation at a time
//	    check           phase of the container, its pod, its files
//	    Move, record    the phase Starting is on the disk before anything happens outside
//	    launcher.Start  the first outside effect
//	    publish         clients and events see the container running; its monitor is watched
//	  after an error    the steps are undone, or repeated in the background until they succeed
//
// Other types than Manager do the work that only some operations need:
//
//	recovery      adopts what an earlier daemon has left (recover.go, recover_stateless.go)
//	creations     joins a repeated request to the running one (creations.go)
//	deferredWork  repeats what has failed (deferred.go, retries.go)
//	nriCalls      calls NRI plugins, and applies what they request (plugins.go, plugin_updates.go)
//	checkpoints   saves running containers (checkpoint*.go)
//	restorer      creates pods that continue a checkpoint (restore.go)
//	meters        measures pods and containers (stats.go, oom.go)
//	starts        keeps the traces of pod starts (trace.go)
//	eventLog      logs the events of pods and containers (log.go)
//
// # Contract
//
// One operation at a time holds an object's lock and changes it. Readers never wait: Pods,
// Containers, Pod and Container return immutable snapshots from atomic pointers, without lock, disk
// or RPC.
//
// The manager writes an object's record before the first effect outside the daemon. Such effects
// are a network namespace, CNI ADD, a cgroup, a mount or a process. The names of all outside
// effects derive from the object's ID. Undoing therefore needs no memory of completed steps: it
// repeats all idempotent removal steps and removes the record last. A failed removal is retried
// until it succeeds, by this daemon or the next one.
//
// Creation is idempotent: a second RunPodSandbox or CreateContainer with the same identity and
// content joins the running operation or returns its result. Operations continue when the caller
// leaves.
//
// A container's runtime-spec is built when the container is planned, and once more if plugins have
// changed the container. state.Node has the values that a daemon decides once for all specs.
//
// A container ends when its shim ends, which a pidfd reports. The exit record then gives the
// reason. A stop checks the state, sends a signal, and checks again, until the container has ended.
package sandbox

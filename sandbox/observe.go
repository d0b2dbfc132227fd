package sandbox

import "berth/shim"

// Observer receives events of pods and containers, for example to export them as metrics. Its
// methods must not block.
type Observer interface {
	// ContainerStarted reports the start of a container. attempt is the number of earlier
	// containers with the same name in the pod.
	ContainerStarted(attempt uint32)
	// ContainerExited reports the exit of a container with one of the reasons of package state. It
	// also reports exits during the absence of the daemon.
	ContainerExited(reason string)
	// PauseExited reports that a ready pod lost its pause.
	PauseExited()
}

// noObserver ignores all events.
type noObserver struct{}

func (noObserver) ContainerStarted(uint32) {}
func (noObserver) ContainerExited(string)  {}
func (noObserver) PauseExited()            {}

// Launchers returns counts of the processes that start containers.
func (m *Manager) Launchers() shim.Counts { return m.pool.Counts() }

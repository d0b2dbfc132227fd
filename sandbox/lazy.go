package sandbox

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/sandbox/state"
)

// keep returns the files that a container's monitor must keep open because a layer of its image, or
// of an image volume, is incomplete.
func (m *Manager) keep(spec *state.ContainerSpec) []*os.File { return keepFor(m.images, spec) }

func keepFor(images Images, spec *state.ContainerSpec) []*os.File {
	if files := images.Keep(spec.Image.Layers); files != nil {
		return files
	}
	for _, v := range spec.Volumes {
		if files := images.Keep(v.Layers); files != nil {
			return files
		}
	}
	return nil
}

// layersComplete reports whether all layers of a container exist and are complete.
func (m *Manager) layersComplete(spec *state.ContainerSpec) bool {
	complete := m.images.Complete(spec.Image.Layers)
	for _, v := range spec.Volumes {
		complete = complete && m.images.Complete(v.Layers)
	}
	return complete
}

// killIfLayersLost kills a container that reads zeros where the content of a layer is missing. That
// is so if no process has kept the fanotify group of its layers (see package fill).
func (m *Manager) killIfLayersLost(c lockedContainer) {
	if !m.cfg.LayersLost || !c.Lazy || m.layersComplete(c.ContainerSpec) {
		return
	}
	m.log.Error("container is killed: its image is incomplete, and no process has kept the guard against zeros",
		"container", c.ID, "image", c.Image.ID)
	m.tasks.RetryInBackground("kill", c.String(), func(ctx context.Context) error {
		return m.control.killContainer(ctx, c.container)
	})
}

// layersUsable returns DataLoss if a layer of a container cannot be completed.
func (m *Manager) layersUsable(spec *state.ContainerSpec) error {
	for _, layers := range chainsOf(spec) {
		if err := m.images.Usable(layers); err != nil {
			return err
		}
	}
	return nil
}

// chainsOf returns the layers of a container's image and image volumes.
func chainsOf(spec *state.ContainerSpec) [][]digest.Digest {
	chains := [][]digest.Digest{spec.Image.Layers}
	for _, v := range spec.Volumes {
		chains = append(chains, v.Layers)
	}
	return chains
}

// killIfUnusable kills a container that has started on a layer that cannot be completed. The
// layer's table of contents may be wrong.
func (m *Manager) killIfUnusable(c lockedContainer) {
	if err := m.layersUsable(c.ContainerSpec); err != nil {
		m.killWrong(c.container, err.Error())
	}
}

// KillOnLayer kills the containers that use a layer, because its table of contents was wrong or was
// not proven. The exit of each has the reason. It returns at once.
func (m *Manager) KillOnLayer(layer digest.Digest, reason string) {
	for _, c := range m.objects.containers.Snapshot() {
		has := func(chain []digest.Digest) bool { return slices.Contains(chain, layer) }
		if slices.ContainsFunc(chainsOf(c.ContainerSpec), has) {
			m.killWrong(c, reason)
		}
	}
}

// noteTimeout limits the wait for a container's lock. After it, the container is killed and its
// exit has no reason.
const noteTimeout = 2 * time.Second

// killWrong kills a container in the background if it runs or starts. Its exit has the reason,
// unless another operation has the container's lock for long. A created container cannot start any
// more, because its user comes from the wrong files.
func (m *Manager) killWrong(c *container, reason string) {
	m.tasks.RetryInBackground("kill", c.String(), func(ctx context.Context) error {
		noting, cancel := context.WithTimeout(ctx, noteTimeout)
		defer cancel()
		runs, over := true, false
		err := m.control.lockContainer(noting, c, "note the kill of", func(c lockedContainer) error {
			runs = c.Phase() == state.ContainerRunning || c.Phase() == state.ContainerStarting
			over = !runs && c.Phase() != state.ContainerCreated
			if over {
				return nil
			}
			c.WrongFiles = reason // a created container must not start
			return m.writeContainer(noting, c)
		})
		switch {
		case over:
			return nil
		case !runs || c.running.Load() == nil: // a start in progress ends, or is killed by the next attempt
			return err
		}
		m.log.Error("container is killed: its files may be wrong", "container", c.ID, "reason", reason, "noted", err == nil)
		return m.control.killContainer(ctx, c)
	})
}

package lazy

import (
	"fmt"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
)

// wrongFiles reports layers whose files may be wrong, so that the containers on them are killed.
type wrongFiles struct {
	mu sync.Mutex
	// +checklocks:mu
	kill func(layer digest.Digest, reason string)
	// +checklocks:mu
	early map[digest.Digest]string // found before kill was set
}

// OnWrongFiles sets the function that kills the containers on a layer whose files may be wrong. It
// is called once for each such layer, also for layers that were found before. It must not block.
func (z *Layers) OnWrongFiles(kill func(layer digest.Digest, reason string)) { z.wrong.set(kill) }

func (w *wrongFiles) add(layer digest.Digest, reason string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kill != nil {
		w.kill(layer, reason)
		return
	}
	if w.early == nil {
		w.early = map[digest.Digest]string{}
	}
	w.early[layer] = reason
}

func (w *wrongFiles) set(kill func(layer digest.Digest, reason string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kill = kill
	for layer, reason := range w.early {
		kill(layer, reason)
	}
	w.early = nil
}

// NoteUnloaded notes which unproven layers a new store has not loaded. They can never be proven.
// placed and aside are the results of layer.Unproven before the store was opened. An earlier daemon
// may have ended before it killed the containers on a layer that was set aside. So such a layer
// also counts, unless another layer has its name (isThere).
func (z *Layers) NoteUnloaded(store *layer.Store, isThere func(digest.Digest) bool,
	placed, aside []digest.Digest) {
	z.unloaded = slices.DeleteFunc(aside, isThere)
	for _, name := range placed {
		if store.TOC(name) == nil && !slices.Contains(z.unloaded, name) {
			z.unloaded = append(z.unloaded, name)
		}
	}
}

// endUnloaded ends the containers on a layer that could not be loaded. The image store has set the
// layer's images aside, because a layer is missing.
func (z *Layers) endUnloaded(name digest.Digest) {
	z.log.Error("a layer whose index was not proven cannot be used any more; the containers on it are killed", "layer", name)
	z.wrong.add(name, fmt.Sprintf("the files of the image may have been wrong: the index of the layer %s was not proven, "+
		"and the layer cannot be used any more", name))
}

package image

import (
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint"
)

// Recorded is what the record of an image says.
type Recorded struct {
	ID            string
	Tags, Digests []string
	Layers        []digest.Digest // names in the layer store, bottom first
	Sequence      uint64          // of its last write: a tag in two records belongs to the younger one
}

// ReadRecords reads the records of the store in root, whether it is open or not, and changes
// nothing.
func ReadRecords(root string) (map[string]*Recorded, checkpoint.Survey, error) {
	images := map[string]*Recorded{}
	survey, err := checkpoint.Inspect(filepath.Join(root, recordsDir), recordKind, recordVersion, func(name string, _ int, body []byte) error {
		id := "sha256:" + name
		rec, err := decodeRecord(id, body)
		if err != nil {
			return err
		}
		images[id] = &Recorded{ID: id, Tags: rec.Tags, Digests: rec.Digests, Layers: rec.layers(), Sequence: rec.Sequence}
		return nil
	})
	return images, survey, err
}

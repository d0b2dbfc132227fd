package image

import (
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
)

// Recorded is the content of an image's record.
type Recorded struct {
	ID            string
	Tags, Digests []string
	Layers        []digest.Digest // names in the layer store, bottom first
	Sequence      uint64          // of the last write; if two records have a tag, the record with the higher sequence owns it
}

// ReadRecords reads the records of the store in root without changing anything. The store may be
// open.
func ReadRecords(root string) (map[string]*Recorded, record.Survey, error) {
	images := map[string]*Recorded{}
	survey, err := record.Inspect(filepath.Join(root, recordsDir), recordKind, recordVersion,
		func(name string, _ int, body []byte) error {
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

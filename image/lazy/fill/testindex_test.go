package fill

import (
	"encoding/json"

	"berth/image/blobindex"
)

// encodeTestIndex encodes an index whose spans are shorter than package blobindex allows.
func encodeTestIndex(x *blobindex.Index) []byte {
	b, err := json.Marshal(x)
	if err != nil {
		panic(err)
	}
	return b
}

func decodeTestIndex(b []byte) (*blobindex.Index, error) {
	x := &blobindex.Index{}
	return x, json.Unmarshal(b, x)
}

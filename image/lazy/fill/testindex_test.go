package fill

import (
	"encoding/json"

	"berth/image/lazy/index"
)

// encodeTestIndex encodes an index whose spans are shorter than package index allows.
func encodeTestIndex(x *index.Index) []byte {
	b, err := json.Marshal(x)
	if err != nil {
		panic(err)
	}
	return b
}

func decodeTestIndex(b []byte) (*index.Index, error) {
	x := &index.Index{}
	return x, json.Unmarshal(b, x)
}

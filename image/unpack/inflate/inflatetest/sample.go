// Package inflatetest has sample data for the benchmarks of decompressors, so that their results
// are comparable.
package inflatetest

import (
	"bytes"
	"math/rand/v2"
)

// Sample returns size bytes that compress to about a third, like programs and texts. Each call
// returns the same bytes.
func Sample(size int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	words := make([][]byte, 4096)
	for i := range words {
		words[i] = make([]byte, 2+r.IntN(10))
		for j := range words[i] {
			words[i][j] = byte(r.IntN(64) * r.IntN(4))
		}
	}
	var b bytes.Buffer
	for b.Len() < size {
		n := r.IntN(len(words))
		b.Write(words[n*n/len(words)])
	}
	return b.Bytes()[:size]
}

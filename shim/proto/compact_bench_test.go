package proto

import (
	"testing"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
)

// BenchmarkCompact measures the encoding and the decoding of a launch with the profile
// RuntimeDefault.
func BenchmarkCompact(b *testing.B) {
	spec := specconv.Example()
	var err error
	if spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(spec); err != nil {
		b.Fatal(err)
	}
	message := Request{Launch: &Launch{ID: "container", Spec: spec}}
	data := encodeCompact(message)
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			encodeCompact(message)
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			var got Request
			if err := decodeCompact(data, &got); err != nil {
				b.Fatal(err)
			}
		}
	})
}

package criu

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// FuzzFields compares the decoder with protowire's. Groups are the difference: CRIU refuses them.
func FuzzFields(f *testing.F) {
	all := appendInteger(nil, 1, 1<<63)
	all = appendBytes(all, maxNumber, []byte("text"))
	all = protowire.AppendFixed32(protowire.AppendTag(all, 3, protowire.Fixed32Type), 7)
	all = protowire.AppendFixed64(protowire.AppendTag(all, 4, protowire.Fixed64Type), 7)
	for n := range all {
		f.Add(all[:n+1])
	}
	f.Add(protowire.AppendGroup(protowire.AppendTag(nil, 1, protowire.StartGroupType), 1, nil))
	f.Add([]byte{0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 2})
	f.Fuzz(func(t *testing.T, data []byte) {
		rest := data
		err := eachField(data, func(got field) error {
			number, kind, n := protowire.ConsumeTag(rest)
			size := protowire.ConsumeFieldValue(number, kind, rest[max(n, 0):])
			if n < 0 || size < 0 || int(number) != got.number || byte(kind) != byte(got.kind) ||
				!bytes.Equal(got.encoded, rest[:n+size]) {
				t.Fatalf("%x: got %+v, protowire has number %d, type %d, %d and %d bytes", rest, got, number, kind, n, size)
			}
			switch value := rest[n:]; kind {
			case protowire.VarintType:
				if want, _ := protowire.ConsumeVarint(value); got.integer() != want {
					t.Fatalf("%x: integer %d, want %d", rest, got.integer(), want)
				}
			case protowire.BytesType:
				if want, _ := protowire.ConsumeBytes(value); !bytes.Equal(got.content, want) {
					t.Fatalf("%x: bytes %x, want %x", rest, got.content, want)
				}
			}
			rest = rest[n+size:]
			return nil
		})
		if err == nil {
			return
		}
		number, kind, n := protowire.ConsumeTag(rest)
		if n >= 0 && kind != protowire.StartGroupType && protowire.ConsumeFieldValue(number, kind, rest[n:]) >= 0 {
			t.Fatalf("%x: %v, but protowire decodes it", rest, err)
		}
	})
}

func TestAppendFields(t *testing.T) {
	got := appendBytes(appendInteger(nil, 5, 300), 200, []byte("ab"))
	want := protowire.AppendVarint(protowire.AppendTag(nil, 5, protowire.VarintType), 300)
	want = protowire.AppendBytes(protowire.AppendTag(want, 200, protowire.BytesType), []byte("ab"))
	if !bytes.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}

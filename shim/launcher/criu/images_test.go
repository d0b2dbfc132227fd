package criu_test

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
)

// Magics of images.
const (
	mounts   = 0x55563928
	tree     = 0x50273030
	core     = 0x55053847
	memory   = 0x57492820
	pagemaps = 0x56084025
)

// image writes an image with messages whose required fields may be missing.
func image(t testing.TB, dir, name string, magic uint32, entries ...proto.Message) {
	t.Helper()
	data := binary.LittleEndian.AppendUint32(nil, 0x54564319)
	data = binary.LittleEndian.AppendUint32(data, magic)
	for _, e := range entries {
		encoded, err := proto.MarshalOptions{AllowPartial: true}.Marshal(e)
		testutil.Must(t, err)
		data = append(binary.LittleEndian.AppendUint32(data, uint32(len(encoded))), encoded...)
	}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
}

// open opens a directory until the end of the test.
func open(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, f.Close()) })
	return f
}

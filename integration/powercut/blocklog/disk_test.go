package blocklog

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func newTestDisk(t *testing.T, sectors int64) *Disk {
	t.Helper()
	d, err := New(t.TempDir(), sectors*Sector)
	return opened(t, d, err)
}

func opened(t *testing.T, d *Disk, err error) *Disk {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func cut(t *testing.T, d *Disk, position int, loss Loss) *Disk {
	t.Helper()
	c, err := d.Cut(t.TempDir(), position, loss, rand.New(rand.NewPCG(1, 2)))
	return opened(t, c, err)
}

// write fills each sector with one byte of content.
func write(t *testing.T, d *Disk, first int64, content string) {
	t.Helper()
	var p []byte
	for i := range len(content) {
		p = append(p, bytes.Repeat([]byte{content[i]}, Sector)...)
	}
	if n, err := d.WriteAt(p, first*Sector); n != len(p) || err != nil {
		t.Fatalf("write: %d, %v", n, err)
	}
}

// content returns the first byte of each sector, "." for zero. All bytes of a sector must be equal.
func content(t *testing.T, d *Disk) string {
	t.Helper()
	p := make([]byte, d.Size())
	if n, err := d.ReadAt(p, 0); n != len(p) || err != nil {
		t.Fatalf("read: %d, %v", n, err)
	}
	var s []byte
	for i := 0; i < len(p); i += Sector {
		if !bytes.Equal(p[i:i+Sector], bytes.Repeat(p[i:i+1], Sector)) {
			t.Fatalf("sector %d is torn", i/Sector)
		}
		s = append(s, p[i])
	}
	return string(bytes.ReplaceAll(s, []byte{0}, []byte{'.'}))
}

func want(t *testing.T, what string, d *Disk, expected string) {
	t.Helper()
	if got := content(t, d); got != expected {
		t.Errorf("%s is %q, want %q", what, got, expected)
	}
}

func TestCut(t *testing.T) {
	d := newTestDisk(t, 8)
	write(t, d, 0, "aaaa") // 1
	d.Flush()              // 2
	write(t, d, 2, "bbbb") // 3
	if err := d.Discard(0, Sector); err != nil {
		t.Fatal(err)
	} // 4
	d.Flush() // 5
	write(t, d, 5, "c")
	want(t, "the disk", d, ".abbbc..")
	all, none := Loss{Kept: 1, Atomic: Sector}, Loss{Atomic: Sector}
	for _, c := range []struct {
		position  int
		all, none string
	}{
		{0, "........", "........"},
		{1, "aaaa....", "........"},
		{2, "aaaa....", "aaaa...."},
		{3, "aabbbb..", "aaaa...."},
		{4, ".abbbb..", "aaaa...."},
		{5, ".abbbb..", ".abbbb.."},
		{6, ".abbbc..", ".abbbb.."},
	} {
		want(t, "everything kept", cut(t, d, c.position, all), c.all)
		want(t, "nothing kept", cut(t, d, c.position, none), c.none)
	}
	if got := d.Flushes(); len(got) != 2 || got[0] != 2 || got[1] != 5 {
		t.Errorf("flushes end at %v", got)
	}
}

// The result of a cut can be written to and cut again. The original does not change.
func TestCutAgain(t *testing.T) {
	d := newTestDisk(t, 4)
	write(t, d, 0, "ab")
	first := cut(t, d, 1, Loss{Kept: 1, Atomic: Sector})
	write(t, first, 1, "cd")
	first.Flush()
	write(t, first, 0, "e")
	want(t, "the disk", d, "ab..")
	want(t, "the first cut", first, "ecd.")
	want(t, "the first cut before its writes", cut(t, first, 0, Loss{Atomic: Sector}), "ab..")
	want(t, "the first cut after its flush", cut(t, first, 3, Loss{Atomic: Sector}), "acd.")
}

// Units are lost independently, in any order, but never in part.
func TestCutLosesAnySubset(t *testing.T) {
	d := newTestDisk(t, 8)
	write(t, d, 1, "abcdef")
	random := rand.New(rand.NewPCG(3, 4))
	seen := map[string]bool{}
	for range 500 {
		c, err := d.Cut(t.TempDir(), 1, Loss{Kept: 0.5, Atomic: 2 * Sector}, random)
		seen[content(t, opened(t, c, err))] = true
	}
	// The units are a, bc, de and f, in this order on the disk.
	for _, expected := range []string{"........", ".abcdef.", ".a......", "..bc....", "....de..", "......f.", ".abc..f."} {
		if !seen[expected] {
			t.Errorf("%q never occurred", expected)
		}
	}
	if len(seen) != 16 {
		t.Errorf("%d different losses of four units: %v", len(seen), seen)
	}
}

func TestDiskRefusesInvalidArguments(t *testing.T) {
	d := newTestDisk(t, 2)
	for _, c := range []struct{ length, offset int64 }{{1, 0}, {Sector, 1}, {Sector, 2 * Sector}, {Sector, -Sector}} {
		if _, err := d.WriteAt(make([]byte, c.length), c.offset); err == nil {
			t.Errorf("%d bytes were written at %d", c.length, c.offset)
		}
	}
	if _, err := d.Cut(t.TempDir(), 1, Loss{Atomic: Sector}, nil); err == nil {
		t.Error("a cut after the end of the log was accepted")
	}
	if _, err := New(t.TempDir(), 100); err == nil {
		t.Error("a disk size that is no multiple of the sector size was accepted")
	}
}

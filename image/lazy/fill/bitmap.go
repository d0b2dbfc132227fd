package fill

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// filledMagic begins the file "filled". The bits follow, then their SHA-256 together with the
// magic.
const filledMagic = "berth filled spans 1\n"

// bitmap has a bit for each span of a layer.
type bitmap []byte

func newBitmap(n int) bitmap { return make(bitmap, (n+7)/8) }

func (b bitmap) has(i int) bool { return b[i/8]&(1<<(i%8)) != 0 }

func (b bitmap) set(i int) { b[i/8] |= 1 << (i % 8) }

// readBitmap reads the bits of n spans. A file that is damaged, for example by a power cut, has no
// bits, so all spans are filled again.
func readBitmap(f *os.File, n int) (bitmap, error) {
	p := make([]byte, len(filledMagic)+len(newBitmap(n))+sha256.Size+1)
	size, err := f.ReadAt(p, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	body := len(p) - 1 - sha256.Size
	if size != len(p)-1 || !bytes.HasPrefix(p, []byte(filledMagic)) {
		return newBitmap(n), nil
	}
	if sum := sha256.Sum256(p[:body]); !bytes.Equal(sum[:], p[body:size]) {
		return newBitmap(n), nil
	}
	return bitmap(p[len(filledMagic):body:body]), nil
}

// write overwrites the bits in the file durably.
func (b bitmap) write(f *os.File) error {
	p := append([]byte(filledMagic), b...)
	sum := sha256.Sum256(p)
	failpoint.Reach("lazy.write-bitmap")
	_, err := f.WriteAt(append(p, sum[:]...), 0)
	failpoint.Reach("lazy.bitmap-written")
	if err == nil {
		err = unix.Fdatasync(int(f.Fd()))
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	return nil
}

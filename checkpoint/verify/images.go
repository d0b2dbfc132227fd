package verify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/magic"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Limits of images.
const (
	maxImages  = 1 << 16
	maxEntry   = 16 << 20  // bytes of one entry
	maxEntries = 1 << 20   // entries of all images
	maxDecoded = 256 << 20 // bytes of all entries
	maxNesting = 50        // of messages
)

// images are the CRIU images in a directory.
type images struct {
	dir     *os.File
	names   []string // sorted
	read    map[string]bool
	entries int
	decoded int64
	magics  magic.MagicMap
	unknown []string // images with fields that the decoder does not know
}

func openImages(dir *os.File) (*images, error) {
	ims := &images{dir: dir, read: map[string]bool{}, magics: magic.LoadMagic()}
	for {
		names, err := dir.Readdirnames(1024)
		ims.names = append(ims.names, names...)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read directory: %w", err)
		}
		if len(ims.names) > maxImages {
			return nil, fmt.Errorf("more than %d images", maxImages)
		}
	}
	slices.Sort(ims.names)
	return ims, nil
}

// has reports whether there is an image of that name.
func (ims *images) has(name string) bool {
	_, ok := slices.BinarySearch(ims.names, name)
	return ok
}

// numbered returns the names of the images PREFIX-NUMBER.img, by number.
func (ims *images) numbered(prefix string) map[uint32]string {
	found := map[uint32]string{}
	for _, name := range ims.names {
		rest, ok := strings.CutPrefix(name, prefix+"-")
		digits, isImage := strings.CutSuffix(rest, ".img")
		if !ok || !isImage {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 32)
		if err != nil || strconv.FormatUint(n, 10) != digits {
			continue
		}
		found[uint32(n)] = name
	}
	return found
}

// unread returns the names of images that no check has read.
func (ims *images) unread() (names []string) {
	for _, name := range ims.names {
		if !ims.read[name] {
			names = append(names, name)
		}
	}
	return names
}

// open opens an image and marks it as read.
func (ims *images) open(name string) (*os.File, error) {
	ims.read[name] = true
	fd, err := unix.Openat(int(ims.dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	file := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.Join(fmt.Errorf("%s is not a regular file", name), file.Close())
	}
	return file, nil
}

// size returns the size of an image and marks it as read.
func (ims *images) size(name string) (int64, error) {
	file, err := ims.open(name)
	if err != nil {
		return 0, err
	}
	defer file.Close() // it was only read
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// message is a pointer to a generated message.
type message[T any] interface {
	*T
	proto.Message
}

// entriesOf decodes the entries of an image of the kind kind, a name of CRIU's magic. A missing
// image has no entries. after reads what follows an entry; it may be nil.
func entriesOf[T any, P message[T]](
	ims *images, name, kind string, after func(P, *os.File) error,
) (all []P, err error) {
	alloc := func(int) proto.Message {
		all = append(all, P(new(T)))
		return all[len(all)-1]
	}
	if after == nil {
		err = ims.eachEntry(name, kind, alloc, nil)
		return all, err
	}
	err = ims.eachEntry(name, kind, alloc, func(file *os.File) error { return after(all[len(all)-1], file) })
	return all, err
}

// oneOf decodes an image with exactly one entry.
func oneOf[T any, P message[T]](ims *images, name, kind string) (P, error) {
	all, err := entriesOf[T, P](ims, name, kind, nil)
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("%s has %d entries instead of one", name, len(all))
	}
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// eachEntry decodes the entries of an image into the messages that alloc returns for their indexes.
// after reads what follows an entry; it may be nil.
func (ims *images) eachEntry(name, kind string, alloc func(i int) proto.Message, after func(*os.File) error) error {
	if !ims.has(name) {
		return nil
	}
	file, err := ims.open(name)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	if err := ims.checkMagic(file, kind); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for i := 0; ; i++ {
		err := ims.next(file, name, func() proto.Message { return alloc(i) })
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && after != nil {
			err = after(file)
		}
		if err != nil {
			return fmt.Errorf("%s: entry %d: %w", name, i, err)
		}
	}
}

// checkMagic reads the start of an image: two magics, and only one in the inventory.
func (ims *images) checkMagic(r io.Reader, kind string) error {
	wanted := [][]string{{"IMG_COMMON", "IMG_SERVICE"}, {kind}}
	if kind == "INVENTORY" {
		wanted = wanted[1:]
	}
	for _, names := range wanted {
		var word [4]byte
		if _, err := io.ReadFull(r, word[:]); err != nil {
			return fmt.Errorf("read magic: %w", err)
		}
		have := uint64(binary.LittleEndian.Uint32(word[:]))
		if !slices.ContainsFunc(names, func(name string) bool { return ims.magics.ByName[name] == have }) {
			return fmt.Errorf("wrong magic %#x for %s", have, kind)
		}
	}
	return nil
}

// next decodes the next entry. It returns io.EOF itself at the end of the image.
func (ims *images) next(r io.Reader, name string, alloc func() proto.Message) error {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); errors.Is(err, io.EOF) {
		return io.EOF
	} else if err != nil {
		return errTruncated
	}
	size := int64(binary.LittleEndian.Uint32(length[:]))
	ims.entries++
	ims.decoded += size
	if size > maxEntry || ims.entries > maxEntries || ims.decoded > maxDecoded {
		return fmt.Errorf("entry of %d bytes exceeds the limits", size)
	}
	data, err := io.ReadAll(io.LimitReader(r, size)) // allocates what is there, not what is claimed
	if err != nil {
		return err
	}
	if int64(len(data)) != size {
		return errTruncated
	}
	m := alloc()
	if err := (proto.UnmarshalOptions{RecursionLimit: maxNesting}).Unmarshal(data, m); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if hasUnknown(m.ProtoReflect()) && !slices.Contains(ims.unknown, name) {
		ims.unknown = append(ims.unknown, name)
	}
	return nil
}

var errTruncated = errors.New("truncated")

// skip moves over n bytes that follow an entry.
func skip(file *os.File, n int64) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	at, err := file.Seek(n, io.SeekCurrent)
	if err == nil && (n < 0 || at > info.Size()) {
		err = errTruncated
	}
	return err
}

// hasUnknown reports whether a message or one in it has fields that its type lacks.
func hasUnknown(m protoreflect.Message) (unknown bool) {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Message() == nil || f.IsMap() {
			return true
		}
		if !f.IsList() {
			unknown = hasUnknown(v.Message())
			return !unknown
		}
		for i := range v.List().Len() {
			if unknown = hasUnknown(v.List().Get(i).Message()); unknown {
				return false
			}
		}
		return true
	})
	return unknown
}

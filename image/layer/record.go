package layer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/checkpoint"
)

// recordFile is the record of a layer or a join, beside what the driver made. It has the form of
// package checkpoint's records, with their checksum; up to 0.2.0 it was the JSON alone.
const recordFile = "layer.json"

// Kinds and schema version of records.
const (
	layerKind     = "layer"
	joinKind      = "join"
	recordVersion = 1
)

// errNewer is wrapped by the error of a record that a newer berth wrote.
var errNewer = errors.New("a newer berth wrote it")

func writeRecord(dir, kind string, record any) error {
	data, err := checkpoint.Encode(kind, recordVersion, record)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, recordFile), data, 0o600)
}

// readRecord decodes the record of the given kind in dir.
func readRecord(dir, kind string, record any) error {
	data, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return err
	}
	if bytes.HasPrefix(data, []byte("{")) {
		return json.Unmarshal(data, record)
	}
	version, body, err := checkpoint.Decode(kind, data)
	if err != nil {
		return err
	}
	if version > recordVersion {
		return fmt.Errorf("%w: schema version %d, this one knows %d", errNewer, version, recordVersion)
	}
	return json.Unmarshal(body, record)
}

// mayBeGood tells an error of readRecord that says nothing against the record: it cannot be read at the
// moment, for want of memory or descriptors say, or not by this berth. Of what a disk can no longer give that
// is not to be hoped.
func mayBeGood(err error) bool {
	var failed *fs.PathError
	if !errors.As(err, &failed) {
		return errors.Is(err, errNewer)
	}
	for _, lost := range []error{fs.ErrNotExist, unix.ENOTDIR, unix.EISDIR, unix.EIO, unix.EUCLEAN, unix.EBADMSG} {
		if errors.Is(err, lost) {
			return false
		}
	}
	return true
}

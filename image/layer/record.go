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

	"berth/checkpoint/record"
)

// recordFile is the name of the record in the directory of a layer or join. It has the format of
// package checkpoint/record. Up to 0.2.0 it was plain JSON.
const recordFile = "layer.json"

// Kinds and schema version of records.
const (
	layerKind     = "layer"
	joinKind      = "join"
	recordVersion = 1
)

// errNewer is wrapped by the error for a record of a newer berth.
var errNewer = errors.New("written by a newer berth")

func writeRecord(dir, kind string, value any) error {
	data, err := record.Encode(kind, recordVersion, value)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, recordFile), data, 0o600)
}

// readRecord decodes the record of the given kind in dir.
func readRecord(dir, kind string, value any) error {
	data, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return err
	}
	if bytes.HasPrefix(data, []byte("{")) {
		return json.Unmarshal(data, value)
	}
	version, body, err := record.Decode(kind, data)
	if err != nil {
		return err
	}
	if version > recordVersion {
		return fmt.Errorf("%w: schema version %d, this berth supports %d", errNewer, version, recordVersion)
	}
	return json.Unmarshal(body, value)
}

// mayBeGood reports whether a record may be valid although readRecord failed. Memory or descriptors
// may have been short, or a newer berth may have written the record. After an error of a damaged
// disk it counts as invalid.
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

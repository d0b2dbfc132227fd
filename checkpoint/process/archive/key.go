package archive

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// keyFile is the name of the node's key below the daemon's directory "root". Operators may copy it
// to other nodes, which then restore each other's checkpoints.
const keyFile = "checkpoint.key"

const keySize = 32 // bytes

// Key signs the checkpoints of a node. Its text forms show only its ID.
type Key struct{ secret [keySize]byte }

// Signer says who signed an archive.
type Signer int

const (
	OtherNode Signer = iota // with another key, so berth cannot check the signature
	ThisNode                // with this node's key, and the signature is right
)

func (s Signer) String() string {
	if s == ThisNode {
		return "this node"
	}
	return "another node"
}

// LoadKey returns the node's key, which is below the directory root. It creates the key with mode
// 0600 if there is none. A damaged key is FailedPrecondition: berth never replaces a key by itself,
// because the signatures of the node's checkpoints would then be foreign. Only the daemon calls
// LoadKey, and not concurrently.
func LoadKey(root string) (*Key, error) {
	key, err := ReadKey(root)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if err := createKey(filepath.Join(root, keyFile)); err != nil {
		return nil, fmt.Errorf("create key of checkpoints: %w", err)
	}
	return ReadKey(root)
}

// ReadKey is LoadKey, but it returns fs.ErrNotExist if there is no key. A key that other users may
// read is FailedPrecondition.
func ReadKey(root string) (*Key, error) {
	path := filepath.Join(root, keyFile)
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil && (st.Uid != 0 || st.Mode&0o077 != 0) {
		return nil, errdefs.FailedPrecondition("key of checkpoints %s: other users could read it: it belongs to user %d with mode %#o; "+
			"it must belong to root with mode 0600. Make a new key if somebody may have read it", path, st.Uid, st.Mode&0o777)
	}
	var data []byte
	if err == nil {
		data, err = safefs.ReadHostFile(path, keySize)
	}
	if err == nil && len(data) != keySize {
		err = fmt.Errorf("%d bytes instead of %d", len(data), keySize)
	}
	if err != nil {
		return nil, errdefs.FailedPrecondition("key of checkpoints %s is damaged: %w. Delete it to get a new one; "+
			"checkpoints signed with the old key are then refused", path, err)
	}
	key := new(Key)
	copy(key.secret[:], data)
	return key, nil
}

// createKey writes a new key to path.
func createKey(path string) error {
	var secret [keySize]byte
	if _, err := rand.Read(secret[:]); err != nil {
		return err
	}
	tmp := path + ".tmp"
	failpoint.Reach("checkpoint.write-key")
	file, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	failpoint.Reach("checkpoint.wrote-key")
	if err != nil {
		return err
	}
	_, err = file.Write(secret[:])
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	failpoint.Reach("checkpoint.rename-key")
	err = os.Rename(tmp, path)
	failpoint.Reach("checkpoint.renamed-key")
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// ID names the key without revealing it.
func (k *Key) ID() string {
	mac := hmac.New(sha256.New, k.secret[:])
	mac.Write([]byte("berth checkpoint key ID"))
	return hex.EncodeToString(mac.Sum(nil)[:8])
}

// sum returns the HMAC of a manifest.
func (k *Key) sum(manifest []byte) []byte {
	mac := hmac.New(sha256.New, k.secret[:])
	mac.Write([]byte("berth checkpoint manifest\n"))
	mac.Write(manifest)
	return mac.Sum(nil)
}

// String returns the key's ID.
func (k *Key) String() string { return k.ID() }

// GoString returns the key's ID.
func (k *Key) GoString() string { return k.ID() }

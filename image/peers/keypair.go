package peers

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
)

// keyPair is a certificate with its key in PEM files, which may be renewed. Every connection of a
// stranger reads it, so unchanged files are not parsed again. Safe for concurrent use.
type keyPair struct {
	files [2]string // certificate, key

	mu sync.Mutex
	// +checklocks:mu
	seen [2]os.FileInfo
	// +checklocks:mu
	pair *tls.Certificate
	// +checklocks:mu
	err error
}

// get returns the certificate as it is in the files.
func (k *keyPair) get() (*tls.Certificate, error) {
	var now [2]os.FileInfo
	for i, path := range k.files {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("certificate: %w", err)
		}
		now[i] = info
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if unchanged(k.seen[0], now[0]) && unchanged(k.seen[1], now[1]) {
		return k.pair, k.err
	}
	k.seen, k.pair = now, nil
	cert, err := tls.LoadX509KeyPair(k.files[0], k.files[1])
	if err != nil {
		k.err = fmt.Errorf("certificate: %w", err)
		return nil, k.err
	}
	k.pair, k.err = &cert, nil
	return k.pair, nil
}

func unchanged(before, now os.FileInfo) bool {
	return before != nil && os.SameFile(before, now) && before.ModTime().Equal(now.ModTime()) &&
		before.Size() == now.Size()
}

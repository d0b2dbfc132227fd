package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Version changes with every change of the exchange.
const Version = "verify-1"

// Files of the tree. The documents are in directories 0, 1 and so on, in the form of
// containers-image's transport dir: manifest.json, signature-1, signature-2 and so on.
const (
	PolicyFile    = "policy.json" // a policy with default requirements only; its key files are in KeyDir
	ReferenceFile = "reference"   // the image's name with tag or digest
	KeyDir        = "keys"
)

// MaxVerdict limits the output of berth-verify, in bytes.
const MaxVerdict = 64 << 10

// Verdict is the answer. An image is accepted if one of its documents is accepted.
type Verdict struct {
	Accepted bool   `json:"accepted"`
	Reason   string `json:"reason"` // why the image is rejected
}

// ParseVerdict decodes an answer strictly. Any other output than one complete verdict is an error.
func ParseVerdict(data []byte) (Verdict, error) {
	var v Verdict
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return Verdict{}, fmt.Errorf("decode verdict: %w", err)
	}
	if d.More() {
		return Verdict{}, errors.New("decode verdict: more than one")
	}
	return v, nil
}

// sigstoreFormat is the beginning of a file with a sigstore signature: a zero byte and the name of
// the format.
const sigstoreFormat = "\x00sigstore-json\n"

// Sigstore encodes a sigstore signature as a signature file. The key has signed the payload. The
// annotations have the signature, the certificate and the log entry.
func Sigstore(mediaType string, payload []byte, annotations map[string]string) ([]byte, error) {
	data, err := json.Marshal(struct {
		MIMEType    string            `json:"mimeType"`
		Payload     []byte            `json:"payload"`
		Annotations map[string]string `json:"annotations"`
	}{mediaType, payload, annotations})
	return append([]byte(sigstoreFormat), data...), err
}

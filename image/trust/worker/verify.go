//go:build containers_image_openpgp

package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"go.podman.io/image/v5/directory"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"
)

// verify returns nil if the policy in root accepts one of the documents there.
func verify(root string) error {
	policy, err := signature.NewPolicyFromFile(filepath.Join(root, PolicyFile))
	if err != nil {
		return fmt.Errorf("read policy: %w", err)
	}
	name, err := os.ReadFile(filepath.Join(root, ReferenceFile))
	if err != nil {
		return err
	}
	named, err := reference.ParseNormalizedNamed(string(name))
	if err != nil {
		return fmt.Errorf("parse reference: %w", err)
	}
	evaluator, err := signature.NewPolicyContext(policy)
	if err != nil {
		return fmt.Errorf("read policy: %w", err)
	}
	var failed error
	for i := 0; ; i++ {
		dir := filepath.Join(root, strconv.Itoa(i))
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			break
		}
		err := verifyDocument(evaluator, dir, imageName{name: named})
		if err == nil {
			return nil
		}
		failed = err // the last document is the image's manifest, whose error is the most useful
	}
	if failed == nil {
		failed = errors.New("no documents")
	}
	return failed
}

func verifyDocument(evaluator *signature.PolicyContext, dir string, name imageName) error {
	ctx := context.Background()
	ref, err := directory.NewReference(dir)
	if err != nil {
		return err
	}
	source, err := ref.NewImageSource(ctx, nil)
	if err != nil {
		return err
	}
	defer source.Close() // read only
	document := image.UnparsedInstanceWithReference(image.UnparsedInstance(source, nil), name)
	allowed, err := evaluator.IsRunningImageAllowed(ctx, document)
	if err == nil && !allowed {
		err = errors.New("the policy rejects the image")
	}
	return err
}

// imageName is the reference of an image. The policy compares it with the identity in a signature.
// The library calls no methods of the embedded interfaces, which are nil.
type imageName struct {
	types.ImageReference
	name reference.Named
}

func (r imageName) Transport() types.ImageTransport         { return transport{} }
func (r imageName) StringWithinTransport() string           { return "//" + r.name.String() }
func (r imageName) DockerReference() reference.Named        { return r.name }
func (r imageName) PolicyConfigurationIdentity() string     { return r.name.String() }
func (r imageName) PolicyConfigurationNamespaces() []string { return nil }

type transport struct{ types.ImageTransport }

func (transport) Name() string { return "docker" }

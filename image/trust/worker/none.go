//go:build !containers_image_openpgp

package worker

import "errors"

func verify(string) error {
	return errors.New("berth-verify was built without the tag containers_image_openpgp")
}

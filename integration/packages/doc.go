// Package packages tests the Debian package on a node with systemd and kubelet. contrib/guest
// -packages builds two versions of the package and runs the test in a guest, because installing a
// package changes the machine.
package packages

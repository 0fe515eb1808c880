# /etc/profile.d/zero-recipes.sh: a login shell begins with /etc/profile, and a session of sshd with nothing. Both forget
# what the pod was started with: its tokens, RUNPOD_POD_ID, the paths of caches. A command by ssh reads this by BASH_ENV.
if [ -r /run/zero-recipes/environment.sh ]; then
    . /run/zero-recipes/environment.sh
else # no entrypoint has run as root, or this user may not read the tokens
    . /opt/zero-recipes/docker/image.sh
fi
unset BASH_ENV # once a session: the scripts in it keep what it sets
